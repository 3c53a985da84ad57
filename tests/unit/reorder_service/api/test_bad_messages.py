"""Messages of a wrong version, size or order, for every method: one sentence, no change of any state, and the job goes on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from headrace import admission
from headrace.topology_spec import TopologySpec
from headrace.v1 import fleet_pb2, jobs_pb2, membership_pb2, membership_pb2_grpc, payload_pb2, sessions_pb2
from headrace.v1.common_pb2 import Rejection
from headrace.v1.fleet_pb2 import FleetReport, FleetReports
from headrace.v1.membership_pb2 import Formation, ModelProfile, NodeHello, NodeMessage, NodesSpec, UnitLayers
from tests.unit.proto.transport import payload_world
from tests.unit.reorder_service.api.leader_world import Leader, leading
from tests.unit.reorder_service.job_world import Preprocessor, consume, names, submit, told_step

PATIENCE_S = 5
CODE = grpc.StatusCode
INVALID, CONFLICT, NOT_FOUND, ABORTED = (CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION, CODE.NOT_FOUND, CODE.ABORTED)
SERVICES = [
    service
    for module in (jobs_pb2, sessions_pb2, fleet_pb2, membership_pb2, payload_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
METHODS = [f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods]


async def sent(endpoint: str, method: str, *messages: Message | bytes, **said: str) -> tuple[Any, str]:
    """Send messages as one call; status and sentence of its end. On the wire all methods are streams."""

    async def requests() -> AsyncIterator[bytes]:
        for message in messages:
            yield message if isinstance(message, bytes) else message.SerializeToString()

    metadata = [(f"headrace-{key}", text) for key, text in said.items()]
    async with grpc.aio.insecure_channel(endpoint) as channel:
        call = channel.stream_stream(method)(requests(), metadata=metadata, timeout=PATIENCE_S)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as err:
            return err.code(), str(err.details())
        return CODE.OK, ""


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[Leader]:
    async with leading(tmp_path) as leader:
        yield leader


async def state(leader: Leader) -> Any:
    """Everything that is stored, and what the job holds in memory besides."""
    client = leader.service.store.database.client
    read = {"string": client.get, "hash": client.hgetall, "list": lambda key: client.lrange(key, 0, -1)}
    keys = {key: await read[await client.type(key)](key) for key in await client.keys("*") if key != "headrace:leader"}
    run = leader.service.find("job")
    commits = {index: dict(step.commits) for index, step in run.cursor.steps.items()}
    sessions = {rank: (session.id, session.over) for rank, session in run.sessions.by_rank.items()}
    nodes = leader.service.nodes["job"].snapshot.SerializeToString()
    members = sorted(leader.service.fleet.members)
    return keys, run.cursor.committed, run.generation, run.paused, commits, sessions, nodes, members, sorted(leader.service.jobs)


@pytest.mark.parametrize("fault", ["another version", "too large", "no message"])
async def test_every_method_refuses_it_in_a_sentence(leader: Leader, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_MOST_BYTES", {})
    run = await submit(leader.service)
    await told_step(run.open_session(0, 1), 1)
    before = await state(leader)
    producer = payload_world.Producer(1 << 20, shared=False)
    for method in METHODS:
        endpoint = producer.endpoint if "Payload" in method else leader.server.endpoint
        if fault == "another version":
            code, sentence = await sent(endpoint, method, b"", protocol="2", release="9.9")
            assert code is CODE.UNAVAILABLE
            for word in (admission.release(), "version 1", "'9.9'", "version '2'", "run a release that speaks the same"):
                assert word in sentence
        elif fault == "too large":
            code, sentence = await sent(endpoint, method, b"\x0a" * ((1 << 20) + 1))
            assert (method, code, sentence) == (
                method,
                INVALID,
                "a request of 1048577 bytes is too large: this method takes 1048576 at most",
            )
        else:
            code, sentence = await sent(endpoint, method, b"\xff\xff\xff")
            assert (method, code) == (method, INVALID)
            assert "of 3 bytes is not the message that this method takes" in sentence
    producer.stop()
    assert await state(leader) == before
    assert await consume(run, run.open_session(0, 1)) == list(range(6))


NODES = NodesSpec(
    num_nodes=2,
    max_failures=0,
    num_microbatches=2,
    profile=ModelProfile(units=[UnitLayers(unit="llm", num_layers=2)], seconds=[1, 1], layer_bytes=[1, 1], memory_bytes=2),
)
HELLO = NodeMessage(hello=NodeHello(job="job", node="a", address="h:1", spec=NODES))
PREPROCESSOR = FleetReport(hello=fleet_pb2.Hello(preprocessor="q", endpoint="q:1", slots=1, instance="one"))


def open_(**fields: Any) -> Message:
    return sessions_pb2.OpenRequest(**{"job": "job", "rank": 0, "num_ranks": 1, "patient": True} | fields)


def commit(session: str, step: int, **fields: Any) -> Message:
    return sessions_pb2.CommitRequest(**{"session": session, "step": step, "loss": math.nan} | fields)


def fleet(*reports: FleetReport) -> FleetReports:
    return FleetReports(reports=reports)


Build = Callable[[str], Message]
"""Returns a message; it is given the id of the session that is open, at step 2 of 6 with steps 2 and 3 planned."""

WRONG: dict[str, tuple[str, Message | list[Message] | Build, Any, str]] = {
    "open for an unknown job": ("Sessions/Open", open_(job="other"), NOT_FOUND, "no job 'other' here"),
    "open a negative rank": ("Sessions/Open", open_(rank=-1), INVALID, "rank -1 is not in 0"),
    "open a rank too many": ("Sessions/Open", open_(rank=4, num_ranks=3), INVALID, "rank 4 is not in 0"),
    "open too many ranks": ("Sessions/Open", open_(rank=1, num_ranks=9), INVALID, "has 2 replica"),
    "open in a generation that is over": (
        "Sessions/Open",
        lambda s: open_(continues=s, generation=7),
        ABORTED,
        "generation 1 now",
    ),
    "open ahead of the store": ("Sessions/Open", lambda s: open_(continues=s, resume_step=5), CONFLICT, "committed only 2"),
    "open at a negative step": ("Sessions/Open", lambda s: open_(continues=s, resume_step=-4), INVALID, "count from 0"),
    "open a replica that is none": (
        "Sessions/Open",
        lambda s: open_(continues=s, replicas=[7]),
        INVALID,
        "takes replica 7, but job 'job' has 2",
    ),
    "plans of no session": (
        "Sessions/Plans",
        sessions_pb2.PlansRequest(session="job/1/x"),
        NOT_FOUND,
        "no session 'job/1/x'; open one",
    ),
    "plans of a former session": (
        "Sessions/Plans",
        sessions_pb2.PlansRequest(session="job/0/x"),
        ABORTED,
        "rank 0 of job 'job' was opened again",
    ),
    "plans of nothing": ("Sessions/Plans", sessions_pb2.PlansRequest(), NOT_FOUND, "no job ''"),
    "commit of no session": ("Sessions/Commit", commit("job/1/x", 2), NOT_FOUND, "no session 'job/1/x'; open one"),
    "commit of a former session": ("Sessions/Commit", commit("job/0/x", 2), ABORTED, "was opened again"),
    "commit of a step that is not planned": (
        "Sessions/Commit",
        lambda s: commit(s, 5),
        CONFLICT,
        "step 5 of job 'job' is not planned",
    ),
    "commit of a step beyond the end": ("Sessions/Commit", lambda s: commit(s, 99), CONFLICT, "is not planned"),
    "commit of a negative step": ("Sessions/Commit", lambda s: commit(s, -1), INVALID, "steps count from 0"),
    "a lost part of no session": (
        "Sessions/ReportLost",
        sessions_pb2.ReportLostRequest(session="job/5/x", ticket="t"),
        NOT_FOUND,
        "no session 'job/5/x'",
    ),
    "a close of no session": ("Sessions/Close", sessions_pb2.CloseRequest(session="job/5/x"), NOT_FOUND, "no session 'job/5/x'"),
    "a spec that is none": ("Jobs/Submit", lambda s: jobs_pb2.SubmitRequest(spec_json="["), INVALID, "Invalid JSON"),
    "another spec of the same name": (
        "Jobs/Submit",
        jobs_pb2.SubmitRequest(spec_json='{"name": "job", "sources": [{"path": "/e"}]}'),
        CONFLICT,
        "exists with another spec",
    ),
    "a list of fewer than no jobs": ("Jobs/List", jobs_pb2.ListRequest(finished=-1), INVALID, "a number from 1 on, or 0 for all"),
    "show an unknown job": ("Jobs/Show", jobs_pb2.ShowRequest(job="x"), NOT_FOUND, "there are: job"),
    "cancel an unknown job": ("Jobs/Cancel", jobs_pb2.CancelRequest(job="x"), NOT_FOUND, "no job 'x'"),
    "delete an unknown job": ("Jobs/Delete", jobs_pb2.DeleteRequest(job="x"), NOT_FOUND, "no job 'x'"),
    "delete a job that runs": ("Jobs/Delete", jobs_pb2.DeleteRequest(job="job"), CONFLICT, "headrace job cancel job"),
    "pause an unknown job": ("Jobs/Pause", jobs_pb2.PauseRequest(job="x"), NOT_FOUND, "no job 'x'"),
    "manifest of an unknown job": ("Jobs/Manifest", jobs_pb2.ManifestRequest(job="x"), NOT_FOUND, "no job 'x'"),
    "quarantine of an unknown job": ("Jobs/Quarantine", jobs_pb2.QuarantineRequest(job="x"), NOT_FOUND, "no job 'x'"),
    "reset to a step to come": ("Jobs/Reset", jobs_pb2.ResetRequest(job="job", step=3), CONFLICT, "it has committed only 2"),
    "reset to a negative step": ("Jobs/Reset", jobs_pb2.ResetRequest(job="job", step=-1), INVALID, "from 0"),
    "weights of a planned step": (
        "Jobs/SetWeights",
        jobs_pb2.WeightsRequest(job="job", step=0, weights={"d": 1}),
        CONFLICT,
        "are planned already",
    ),
    "a topology of another generation": (
        "Jobs/SetTopology",
        jobs_pb2.TopologyRequest(job="job", topology_json=TopologySpec().model_dump_json(), generation=9),
        CONFLICT,
        "is in generation 1, not 9",
    ),
    "a topology that is none": (
        "Jobs/SetTopology",
        jobs_pb2.TopologyRequest(job="job", topology_json='{"later": 1}'),
        INVALID,
        "later: there is no such field",
    ),
    "a ledger from before its beginning": ("Jobs/Ledger", jobs_pb2.LedgerRequest(job="job", start=-1), INVALID, "count from 0"),
    "a plan that is not at hand": (
        "Jobs/ShowPlan",
        jobs_pb2.ShowPlanRequest(job="job", step=77),
        NOT_FOUND,
        "no plan of step 77",
    ),
    "a preprocessor without a hello": (
        "Fleet/Work",
        fleet(FleetReport(part_decoded=fleet_pb2.PartDecoded(lease="x"))),
        INVALID,
        "begins with its one hello, got part_decoded",
    ),
    "a second hello": ("Fleet/Work", [fleet(PREPROCESSOR), fleet(PREPROCESSOR)], INVALID, "begins with its one hello, got hello"),
    "shards that nobody asked for": (
        "Fleet/Work",
        fleet(PREPROCESSOR, FleetReport(shards_listed=fleet_pb2.ShardsListed(lease="x"))),
        CONFLICT,
        "nobody asked preprocessor 'q' for the shards of lease 'x'",
    ),
    "a node without a hello": (
        "Membership/Join",
        NodeMessage(leave=membership_pb2.Leave()),
        INVALID,
        "the stream of a node begins with its hello",
    ),
    "a node of an unknown job": (
        "Membership/Join",
        NodeMessage(hello=NodeHello(job="x", node="a", address="h:1", spec=NODES)),
        NOT_FOUND,
        "no job 'x'",
    ),
    "a node without a name": (
        "Membership/Join",
        NodeMessage(hello=NodeHello(job="job", address="h:1", spec=NODES)),
        INVALID,
        "a node needs a name",
    ),
    "a second hello of a node": ("Membership/Join", [HELLO, HELLO], INVALID, "begins with its one hello, got another one"),
    # What may come late is passed over.
    "a report for a lease that is over": (
        "Fleet/Work",
        fleet(
            PREPROCESSOR,
            FleetReport(part_decoded=fleet_pb2.PartDecoded(lease="x")),
            FleetReport(samples_probed=fleet_pb2.SamplesProbed(lease="x")),
            FleetReport(shard_indexed=fleet_pb2.ShardIndexed(lease="x", num_samples=3)),
            FleetReport(order_failed=fleet_pb2.OrderFailed(lease="x", error="late")),
            FleetReport(),
        ),
        CODE.OK,
        "",
    ),
    "a relay of sessions that are none": (
        "Sessions/Relay",
        lambda s: sessions_pb2.RelayRequest(
            listen=["job/1/x", "job/0/x", ""], leave=["job/7/y"], commits=[commit("job/0/x", 2), commit(s, -1), commit(s, 99)]
        ),
        CODE.OK,
        "",
    ),
    "a commit that was made before": ("Sessions/Commit", lambda s: commit(s, 1), CODE.OK, ""),
    "a lost part that nobody knows": (
        "Sessions/ReportLost",
        lambda s: sessions_pb2.ReportLostRequest(session=s, ticket="t", lease="l"),
        CODE.OK,
        "",
    ),
    "a recovery of another generation": (
        "Membership/Join",
        [
            HELLO,
            NodeMessage(recovered=membership_pb2.Recovered(generation=9, step=4)),
            NodeMessage(cut_off=membership_pb2.CutOff(generation=9)),
            NodeMessage(leave=membership_pb2.Leave(done=True)),
        ],
        CODE.OK,
        "",
    ),
}
"""What is wrong: method, messages, and how the call ends."""


ASKS_NOTHING = {"/headrace.v1.Jobs/About"}
"""Methods whose message has no field, of which none can be wrong."""


def test_the_table_has_every_method_of_the_reorder_service() -> None:
    asked = {f"/headrace.v1.{method}" for method, *_ in WRONG.values()}
    assert asked == {method for method in METHODS if "Payload" not in method and method not in ASKS_NOTHING}


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_is_out_of_order_changes_nothing(leader: Leader, wrong: str) -> None:
    method, asked, status, sentence = WRONG[wrong]
    preprocessor = Preprocessor(service=leader.service)
    preprocessor.join()
    run = await submit(leader.service, join=False)
    await run.wait_ready()
    session = run.open_session(0, 1)
    assert await consume(run, session, stop=2) == [0, 1]
    await told_step(session, 3)
    before = await state(leader)
    messages = asked if isinstance(asked, list) else [asked(session.id) if callable(asked) else asked]
    code, details = await sent(leader.server.endpoint, f"/headrace.v1.{method}", *messages)
    assert (code, sentence in details) == (status, True), (code, details)
    assert "\n" not in details
    assert "Traceback" not in details
    assert await state(leader) == before
    last = run.open_session(0, 1)
    assert await consume(run, last) == [2, 3, 4, 5]
    assert sorted(name for step in await names(run) for name in step) == sorted(f"d/a/{n}" for n in range(24))


async def test_a_rank_cannot_refuse_samples_of_other_steps(leader: Leader) -> None:
    run = await submit(leader.service)
    session = run.open_session(0, 1)
    await told_step(session, 0)
    foreign = [Rejection(sample_id=n, name=f"d/a/{n}", reason="too_long") for n in (23, 900, -1)]
    method, request = "/headrace.v1.Sessions/Commit", commit(session.id, 0, rejections=foreign)
    assert await sent(leader.server.endpoint, method, request) == (CODE.OK, "")
    assert run.cursor.committed == 1
    assert [item async for item in leader.service.store.quarantine("job")] == []
    assert await consume(run, run.open_session(0, 1)) == [1, 2, 3, 4, 5]
    assert sorted(name for step in await names(run) for name in step) == sorted(f"d/a/{n}" for n in range(24))


async def test_pipelines_of_nodes_that_lack_a_unit_of_the_job_are_not_planned_for(leader: Leader) -> None:
    run = await submit(leader.service)
    nodes = leader.service.nodes["job"]
    async with grpc.aio.insecure_channel(leader.server.endpoint) as channel, asyncio.timeout(PATIENCE_S):
        streams = [membership_pb2_grpc.MembershipStub(channel).Join() for _ in "ab"]
        for name, stream in zip("ab", streams, strict=True):
            await stream.write(NodeMessage(hello=NodeHello(job="job", node=name, address="h:1", spec=NODES)))
        while not (snapshot := await streams[0].read()).generation:
            pass
        formation = Formation(generation=1, pipelines=snapshot.pipelines)
        await streams[0].write(NodeMessage(recovered=membership_pb2.Recovered(generation=1, formation=formation)))
        while not nodes.recoveries:
            await streams[0].read()
        for stream in streams:
            stream.cancel()
    assert not run.formations
    assert await consume(run, run.open_session(0, 1)) == list(range(6))
