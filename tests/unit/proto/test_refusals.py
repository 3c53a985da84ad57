"""What a server refuses by role and rate, and the lines that it writes of refused calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import call_rate, rpc
from headrace.call_rate import CallRate, PermitBucket, host_of
from headrace.errors import LimitError, RoleError
from headrace.refusals import EVERY_S, Reason, Refusals
from headrace.token_folder import TokenFolder, make_tokens
from headrace.v1 import fleet_pb2_grpc, jobs_pb2, jobs_pb2_grpc

CLUSTER = "the-token-of-this-cluster"


class Jobs(jobs_pb2_grpc.JobsServicer):
    """Counts what reaches it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @rpc.unary_method
    async def Cancel(self, request: Any, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:  # noqa: N802
        self.calls.append("Cancel")
        return jobs_pb2.JobStatus(job=request.job)

    @rpc.stream_method
    async def List(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[jobs_pb2.ListReply]:  # noqa: N802
        self.calls.append("List")
        yield jobs_pb2.ListReply()


class Fleet(fleet_pb2_grpc.FleetServicer):
    """Never reached in these tests."""


class World:
    """A server with tokens of all roles, and calls to it."""

    def __init__(self, folder: Path, calls_per_s: float) -> None:
        self.jobs = Jobs()
        self.tokens = {path.name: path.read_text().strip() for path in make_tokens(folder)} | {"cluster": CLUSTER}
        services = {
            "headrace.v1.Jobs": lambda s: jobs_pb2_grpc.add_JobsServicer_to_server(self.jobs, s),
            "headrace.v1.Fleet": lambda s: fleet_pb2_grpc.add_FleetServicer_to_server(Fleet(), s),
        }
        self.server = rpc.Server("127.0.0.1:0", services, token=CLUSTER, tokens=TokenFolder(folder), calls_per_s=calls_per_s)

    async def call(self, role: str, method: str, request: bytes = b"", *, stream: bool = False) -> tuple[Any, str]:
        """(status, sentence) of a call that sends these bytes."""
        metadata = [("authorization", f"Bearer {self.tokens.get(role, role)}")] if role else []
        async with grpc.aio.insecure_channel(self.server.endpoint, options=rpc.CHANNEL_OPTIONS) as channel:
            if stream:
                replies = channel.unary_stream(f"/headrace.v1.{method}")(request, metadata=metadata)
                try:
                    async for _ in replies:
                        pass
                except grpc.aio.AioRpcError:
                    pass
                return await replies.code(), await replies.details()
            call = channel.unary_unary(f"/headrace.v1.{method}")(request, metadata=metadata)
            return await call.code(), await call.details()


@pytest.fixture
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made = World(tmp_path / "tokens", getattr(request, "param", 1e9))
    await made.server.start()
    yield made
    await made.server.stop(0)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("refused a call")]


async def test_each_role_is_let_in_where_it_belongs(world: World) -> None:
    for role, may_list, may_cancel in (
        ("submit", True, True),
        ("train", True, False),
        ("watch", True, False),
        ("preprocess", False, False),
        ("cluster", True, True),
    ):
        for method, may, stream in (("Jobs/List", may_list, True), ("Jobs/Cancel", may_cancel, False)):
            world.jobs.calls.clear()
            code, sentence = await world.call(role, method, stream=stream)
            assert code is (grpc.StatusCode.OK if may else grpc.StatusCode.PERMISSION_DENIED), (role, method, sentence)
            assert bool(world.jobs.calls) is may


async def test_who_lacks_the_role_is_told_which_and_nothing_is_decoded(world: World, caplog: pytest.LogCaptureFixture) -> None:
    code, sentence = await world.call("train", "Jobs/Cancel", b"\xff\xff\xff")
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert sentence.startswith(
        "Jobs/Cancel takes the role submit, and the call's token has train: give this process a token of the"
    )
    code, sentence = await world.call("watch", "Fleet/Work", stream=True)
    assert (code, sentence[:43]) == (grpc.StatusCode.PERMISSION_DENIED, "Fleet/Work takes the role preprocess, and t")
    (line,) = lines(caplog)
    assert "method=/headrace.v1.Jobs/Cancel peer=ipv4:127.0.0.1:" in line
    assert 'reason=role release="not said" has=train takes=submit' in line
    assert not any(token in caplog.text for token in world.tokens.values())
    assert not world.jobs.calls


async def test_who_is_unknown_is_told_what_is_asked(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for token, brought in (("", "none"), ("not-a-token-of-this-one", "another one")):
        code, sentence = await world.call(token, "Jobs/Cancel", b"\xff")
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert f"asks for a role's token, and the call brought {brought}: give this process one of its --tokens" in sentence
    assert ['reason="no token"' in line for line in lines(caplog)] == [True, False]
    assert not world.jobs.calls


async def test_a_client_raises_what_it_is_told(world: World) -> None:
    def cancel() -> None:
        with rpc.channel(world.server.endpoint, token=world.tokens["watch"]) as channel:
            rpc.call(jobs_pb2_grpc.JobsStub(channel).Cancel, jobs_pb2.CancelRequest(job="j"), world.server.endpoint)

    with pytest.raises(RoleError, match=r"127\.0\.0\.1:\d+: Jobs/Cancel takes the role submit, and the call's token has watch"):
        await asyncio.to_thread(cancel)


async def test_requests_that_are_none_and_other_protocols_are_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    assert (await world.call("cluster", "Jobs/Cancel", b"\xff\xff"))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert (await world.call("cluster", "Jobs/List", bytes(2_000_000), stream=True))[0] is grpc.StatusCode.INVALID_ARGUMENT
    async with grpc.aio.insecure_channel(world.server.endpoint) as channel:
        said = [("authorization", f"Bearer {CLUSTER}"), ("headrace-protocol", "9"), ("headrace-release", "7.0" + 99 * "x")]
        call = channel.unary_unary("/headrace.v1.Jobs/Cancel")(b"", metadata=said)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
    found = lines(caplog)
    assert len(found) == 3
    assert "method=/headrace.v1.Jobs/Cancel" in found[0]
    assert "reason=malformed" in found[0]
    assert "method=/headrace.v1.Jobs/List" in found[1]
    assert 'reason="too large"' in found[1]
    assert f"reason=protocol release=7.0{17 * 'x'} version=9" in found[2]


@pytest.mark.parametrize("world", [3], indirect=True)
async def test_a_host_that_calls_too_often_is_told_to_wait(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.admission.time.monotonic", lambda: 5.0)
    for method, stream in (("Jobs/List", True), ("Jobs/Cancel", False), ("Jobs/List", True)):
        assert (await world.call("submit", method, stream=stream))[0] is grpc.StatusCode.OK
    for method, stream in (("Jobs/List", True), ("Jobs/Cancel", False)):
        code, sentence = await world.call("submit", method, b"\xff", stream=stream)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "answers 3 calls a second of one host about jobs, and yours makes more: wait a second" in sentence
    assert len(world.jobs.calls) == 3
    assert 'reason="too many calls"' in lines(caplog)[0]

    def cancel() -> None:
        with rpc.channel(world.server.endpoint, token=CLUSTER) as channel:
            rpc.call(jobs_pb2_grpc.JobsStub(channel).Cancel, jobs_pb2.CancelRequest(job="j"), world.server.endpoint)

    with pytest.raises(LimitError, match="wait a second"):
        await asyncio.to_thread(cancel)


class Call:
    """A call's context, of which the log takes who called."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("headrace-release", "0.1"),)

    def peer(self) -> str:
        return "ipv4:10.0.0.7:51234"


@given(
    st.lists(st.tuples(st.sampled_from(list(Reason)), st.floats(0, 0.4)), max_size=60),
)
def test_of_each_reason_a_line_a_second_at_most_and_all_are_counted(calls: list[tuple[Reason, float]]) -> None:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("headrace.refusals")
    log.addHandler(handler)
    now_s = 0.0
    try:
        refusals = Refusals(lambda: now_s)
        for reason, passed_s in calls:
            now_s += passed_s
            refusals.note(reason, "/m", Call())
        assert len(heard) <= len({reason for reason, _ in calls}) * (1 + now_s / EVERY_S)
        now_s += 2 * EVERY_S
        for reason in Reason:
            refusals.note(reason, "/m", Call())
    finally:
        log.removeHandler(handler)
    left_out = sum(int(line.rpartition("left_out=")[2]) for line in heard if "left_out=" in line)
    assert len(heard) + left_out == len(calls) + len(Reason)


@given(st.floats(1, 100), st.lists(st.floats(0, 2), max_size=200))
def test_a_bucket_lets_through_its_rate_and_a_second_more(per_s: float, pauses_s: list[float]) -> None:
    bucket, now_s, taken = PermitBucket(per_s, per_s, 0.0), 0.0, 0
    for pause_s in pauses_s:
        now_s += pause_s
        taken += bucket.take(now_s)
        assert 0 <= bucket.permits <= per_s
        assert taken <= per_s * (now_s + 1) * (1 + 1e-9) + 1e-6
    assert bucket.take(now_s + 1 / per_s + 1e-6), "who waits is let through"


def test_hosts_have_buckets_of_their_own_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_rate, "MOST_HOSTS", 3)
    rate = CallRate(1)
    assert [rate.take("a", 0.0), rate.take("a", 0.0), rate.take("b", 0.0)] == [True, False, True]
    for host in "cd":
        rate.take(host, 0.0)
    assert len(rate) == 3
    assert not rate.take("b", 0.0)


@pytest.mark.parametrize(
    ("peer", "host"), [("ipv4:10.0.0.7:51234", "ipv4:10.0.0.7"), ("ipv6:[::1]:5", "ipv6:[::1]"), ("unix:/a:b", "unix:/a:b")]
)
def test_a_host_is_its_address(peer: str, host: str) -> None:
    assert host_of(peer) == host
