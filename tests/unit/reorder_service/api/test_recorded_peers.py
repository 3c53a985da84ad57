"""Old preprocessors, ranks and nodes at a leader of today, which a former release's messages reach (tests/histories)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.ledger import ledger_sha256
from headrace.v1 import membership_pb2, membership_pb2_grpc
from tests.histories.history import histories
from tests.histories.newer import with_a_field_more
from tests.unit.reorder_service.api.leader_world import Leader, leading
from tests.unit.reorder_service.api.recorded_peers import (
    BEAT_S,
    Alter,
    RecordedPreprocessor,
    RecordedRank,
    asked_of,
    said_by,
    served,
)

PATIENCE_S = 60
as_recorded: Alter = lambda message: None  # noqa: E731
of_any_release = pytest.mark.parametrize("alter", [as_recorded, with_a_field_more], ids=["as recorded", "with a field more"])
recorded = pytest.mark.parametrize("folder", histories("preprocessor.jsonl"))


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[Leader]:
    async with leading(tmp_path) as leader:
        yield leader


@contextlib.asynccontextmanager
async def serving(preprocessor: RecordedPreprocessor, endpoint: str) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(preprocessor.serve(endpoint))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@of_any_release
@recorded
@pytest.mark.parametrize("job", ["rank", "pipeline"])
async def test_an_old_preprocessor_and_an_old_trainer_finish_a_job_with_the_same_plans_and_ledger(
    leader: Leader, folder: Path, job: str, alter: Alter
) -> None:
    rank = RecordedRank(folder / f"{job}.jsonl", alter)
    preprocessor = RecordedPreprocessor(folder, alter)
    await leader.submit(rank.submitted)
    async with serving(preprocessor, leader.server.endpoint) as serving_preprocessor:
        told = await served(asyncio.create_task(rank.train(leader.server.endpoint)), serving_preprocessor)
    indexed, probed, decoded = asked_of(preprocessor.heard, job)
    *former, parts = asked_of(preprocessor.told, job)
    assert [indexed, probed] == former
    both = decoded.keys() & parts.keys()  # of a step that is committed meanwhile not all parts are ordered
    assert {name: decoded[name] for name in both} == {name: parts[name] for name in both}
    assert told.keys() == rank.plans.keys()
    for step, plan in told.items():
        assert [(m.replica, m.index, m.num_samples, m.packs, m.parts) for m in plan.microbatches] == [
            (m.replica, m.index, m.num_samples, m.packs, m.parts) for m in rank.plans[step].microbatches
        ]
        assert plan.whole.units == rank.plans[step].whole.units
    service, recorded_end = leader.service, json.loads((folder / "ends.json").read_text())[job]
    assert service.find(job).cursor.state == "DONE"
    ledger = [entry async for entry in service.store.ledger(job)]
    refused = {item.name: str(item.reason) async for item in service.store.quarantine(job)}
    assert {"ledger": ledger_sha256(ledger), "refused": refused} == recorded_end


@of_any_release
@recorded
async def test_old_nodes_form_the_same_pipelines_lose_one_and_go_on(leader: Leader, folder: Path, alter: Alter) -> None:
    file = folder / "nodes.jsonl"
    await leader.submit(said_by(file, "Jobs/Submit", by_client=True)[0].message)
    messages = [membership_pb2.NodeMessage.FromString(said.message) for said in said_by(file, "Membership/Join", by_client=True)]
    hellos = {message.hello.node: message for message in messages if message.HasField("hello")}
    (recovered,) = (message for message in messages if message.HasField("recovered"))
    snapshots = {
        snapshot.generation: snapshot
        for said in said_by(file, "Membership/Join", by_client=False)
        if (snapshot := membership_pb2.Snapshot.FromString(said.message)).generation
    }
    for message in messages:
        alter(message)
    async with (
        grpc.aio.insecure_channel(leader.server.endpoint) as channel,
        serving(RecordedPreprocessor(folder, alter), leader.server.endpoint),
        asyncio.timeout(PATIENCE_S),
    ):
        await leader.service.find("nodes").wait_ready()
        streams = {}
        for name in sorted(hellos):
            streams[name] = membership_pb2_grpc.MembershipStub(channel).Join()
            await streams[name].write(hellos[name])
        alive = dict(streams)
        heard = asyncio.create_task(beat(alive))
        first = await newest(streams["a"], 1)
        assert sorted(node.name for node in first.nodes) == sorted(node.name for node in snapshots[1].nodes)
        assert shapes(first) == shapes(snapshots[1])
        alive.pop("e").cancel()
        second = await newest(streams["a"], 2)
        assert (second.change, shapes(second)) == (snapshots[2].change, shapes(snapshots[2]))
        del recovered.recovered.formation.pipelines[:]
        recovered.recovered.formation.pipelines.extend(second.pipelines)
        await streams["a"].write(recovered)
        nodes = leader.service.nodes["nodes"]
        while not nodes.recoveries:
            await newest(streams["a"], 0)
        assert (nodes.recoveries[0].generation, nodes.recoveries[0].step) == (2, recovered.recovered.step)
        heard.cancel()
        for stream in streams.values():
            stream.cancel()


async def newest(stream: Any, generation: int) -> Any:
    """The next snapshot of a generation; 0: the next message."""
    while (snapshot := await stream.read()).generation != generation:
        pass
    return snapshot


async def beat(streams: dict[str, Any]) -> None:
    """Keep nodes alive, as long as they are among these."""
    while True:
        for name, stream in list(streams.items()):
            try:
                await stream.write(membership_pb2.NodeMessage(heartbeat=membership_pb2.NodeHeartbeat()))
            except (asyncio.CancelledError, asyncio.InvalidStateError):
                if name in streams:
                    raise
        await asyncio.sleep(BEAT_S)


def shapes(snapshot: Any) -> list[list[tuple[str, int, int]]]:
    """Units and layers of the stages of each pipeline, whichever nodes have them."""
    return [[(stage.unit, stage.first_layer, stage.end_layer) for stage in pipe.stages] for pipe in snapshot.pipelines]
