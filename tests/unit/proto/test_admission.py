"""Who is let in: the cluster's token, the protocol's version, and requests that are none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace import rpc
from headrace.admission import LARGEST_REQUEST_BYTES, MIB, release
from headrace.cluster_token import TOKEN, TOKEN_FILE, await_token_file, check_exposure, cluster_token, make_token_file
from headrace.errors import UnauthenticatedError, UserError
from headrace.limits import MAX_PATH, MAX_SOURCE_NAME, MAX_SOURCES
from headrace.manifest import PAGE_SHARDS
from headrace.outbox import MAX_BATCH
from headrace.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from tests.wire import Wire

MOST_SAMPLES = 1024  # of a probe, in release 0.1
SECRET = "s3cret-of-this-cluster"


class Jobs(jobs_pb2_grpc.JobsServicer):
    """Counts what reaches it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @rpc.unary_method
    async def Submit(self, request: Any, context: grpc.aio.ServicerContext) -> jobs_pb2.SubmitReply:  # noqa: N802
        self.calls.append("Submit")
        return jobs_pb2.SubmitReply(job="j")

    @rpc.stream_method
    async def Ledger(  # noqa: N802
        self, request: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[jobs_pb2.LedgerEntry]:
        self.calls.append("Ledger")
        yield jobs_pb2.LedgerEntry(step=3)


class Fleet(fleet_pb2_grpc.FleetServicer):
    """Hears reports until one is refused."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.listens = asyncio.Event()
        self.listens.set()

    @rpc.stream_method
    async def Work(  # noqa: N802
        self, messages: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[fleet_pb2.FleetOrders]:
        await self.listens.wait()
        async for message in messages:
            self.heard.append(len(message.reports))
            yield fleet_pb2.FleetOrders()


Serve = Callable[[str], Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """(token) -> endpoint, Jobs and Fleet of a server that asks for that token; empty: for none."""
    servers: list[rpc.Server] = []

    async def start(token: str) -> tuple[str, Jobs, Fleet]:
        jobs, fleet = Jobs(), Fleet()
        added: dict[str, Callable[[grpc.aio.Server], None]] = {
            "headrace.v1.Jobs": lambda s: jobs_pb2_grpc.add_JobsServicer_to_server(jobs, s),
            "headrace.v1.Fleet": lambda s: fleet_pb2_grpc.add_FleetServicer_to_server(fleet, s),
        }
        server = rpc.Server("127.0.0.1:0", added, token=token)
        await server.start()
        servers.append(server)
        return server.endpoint, jobs, fleet

    yield start
    for server in servers:
        await server.stop(0)


async def submit(endpoint: str, token: str | None = None, spec_json: str = "{}") -> str:
    def blocking() -> str:
        with rpc.channel(endpoint, token=token) as channel:
            reply = rpc.call(jobs_pb2_grpc.JobsStub(channel).Submit, jobs_pb2.SubmitRequest(spec_json=spec_json), endpoint)
        return str(reply.job)

    return await asyncio.to_thread(blocking)


async def ledger(endpoint: str, token: str | None = None) -> list[int]:
    def blocking() -> list[int]:
        with rpc.translated(endpoint), rpc.channel(endpoint, token=token) as channel:
            return [entry.step for entry in jobs_pb2_grpc.JobsStub(channel).Ledger(jobs_pb2.LedgerRequest())]

    return await asyncio.to_thread(blocking)


async def sent(endpoint: str, method: str, message: bytes, *, stream: bool = False, **said: str) -> tuple[Any, str]:
    """Bytes as they are, in a call of their own; `said`: of itself. (status, sentence) of its end."""
    async with grpc.aio.insecure_channel(endpoint, options=rpc.CHANNEL_OPTIONS) as channel:
        make = channel.stream_stream if stream else channel.unary_unary

        async def messages() -> AsyncIterator[bytes]:
            yield message

        call = make(method)(messages() if stream else message, metadata=[(f"headrace-{key}", text) for key, text in said.items()])
        if stream:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
        return await call.code(), await call.details()


async def test_only_who_says_the_token_is_let_in(serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    endpoint, jobs, fleet = await serve(SECRET)
    with pytest.raises(
        UnauthenticatedError, match=f"{endpoint}: this service asks for .* brought none: .*HEADRACE_CLUSTER_TOKEN"
    ):
        await submit(endpoint)
    with pytest.raises(UnauthenticatedError, match="brought another one"):
        await ledger(endpoint, "another-secret-of-a-kind")
    code, _ = await sent(endpoint, "/headrace.v1.Fleet/Work", b"", stream=True)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    code, _ = await sent(endpoint, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", b"", stream=True)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert (jobs.calls, fleet.heard) == ([], [])

    assert (await submit(endpoint, SECRET), await ledger(endpoint, SECRET)) == ("j", [3])
    monkeypatch.setenv(TOKEN, SECRET)
    assert await submit(endpoint) == "j"
    monkeypatch.delenv(TOKEN)
    (tmp_path / "token").write_text(f"{SECRET}\n")
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    assert await submit(endpoint) == "j"
    async with rpc.aio_channel(endpoint) as channel:

        async def nothing() -> AsyncIterator[fleet_pb2.FleetReports]:
            yield fleet_pb2.FleetReports()

        stream = fleet_pb2_grpc.FleetStub(channel).Work(nothing(), metadata=rpc.metadata())
        assert [message async for message in stream] == [fleet_pb2.FleetOrders()]


async def test_of_a_stream_without_the_token_little_arrives(serve: Serve) -> None:
    endpoint, _, _ = await serve(SECRET)
    wire = Wire(endpoint)
    code, _ = await sent(f"127.0.0.1:{wire.port}", "/headrace.v1.Fleet/Work", bytes(16 * MIB), stream=True)
    wire.stop()
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert wire.num_bytes_forth < MIB


async def test_health_is_told_to_everybody(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the file of the token is not there yet: a container's health check begins at once."""
    monkeypatch.setenv(TOKEN_FILE, "/nowhere/token")
    endpoint, _, _ = await serve(SECRET)
    assert await asyncio.to_thread(rpc.is_serving, endpoint, "headrace.v1.Jobs")


async def test_a_peer_of_another_protocol_is_told_to_wait(serve: Serve) -> None:
    endpoint, jobs, _ = await serve("")
    code, details = await sent(endpoint, "/headrace.v1.Jobs/Submit", b"", protocol="7", release="9.0")
    assert code is grpc.StatusCode.UNAVAILABLE
    assert f"of release {release()}, speaks version 1 of the protocol, and who asks, of release '9.0', version '7'" in details
    assert not jobs.calls
    assert (await sent(endpoint, "/headrace.v1.Jobs/Submit", b""))[0] is grpc.StatusCode.OK, "0.1 says no version"


async def test_a_peer_of_another_release_that_speaks_the_same_protocol_is_let_in_and_named_once(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, jobs, _ = await serve("")
    with caplog.at_level(logging.WARNING):
        await submit(endpoint)
        assert "another release" not in caplog.text, "it says its own"
        for n in range(60):
            assert (await sent(endpoint, "/headrace.v1.Jobs/Submit", b"", release=f"9.{n // 2}"))[0] is grpc.StatusCode.OK
    said = [record.getMessage() for record in caplog.records if "another release" in record.getMessage()]
    assert said[:2] == [f"a peer of another release calls release=9.{n} own={release()}" for n in range(2)]
    assert len(said) == 16, "anybody may say any"
    assert len(jobs.calls) == 61


@pytest.mark.parametrize("message", [b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x02\xed\xa0", b"\x08\x01" * 3 + b"\x0f"])
async def test_what_is_no_message_is_refused_in_a_sentence(
    serve: Serve, message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log has no traceback of it: anybody could fill it."""
    endpoint, jobs, fleet = await serve("")
    with caplog.at_level(logging.DEBUG):
        for method, stream in (("Jobs/Submit", False), ("Jobs/Ledger", False), ("Fleet/Work", True)):
            code, details = await sent(endpoint, f"/headrace.v1.{method}", message, stream=stream)
            assert (code, "is not the message that this method takes" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert (jobs.calls, fleet.heard) == ([], [])
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_request_that_is_too_large_is_not_decoded(serve: Serve) -> None:
    endpoint, jobs, fleet = await serve("")
    with pytest.raises(UserError, match=r"of 9000005 bytes is too large: this method takes 8388608 at most"):
        await submit(endpoint, spec_json="x" * 9_000_000)
    code, details = await sent(endpoint, "/headrace.v1.Jobs/Ledger", b"x" * 2_000_000)
    assert (code, "of 2000000 bytes is too large: this method takes 1048576" in details) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        True,
    )
    assert not jobs.calls
    pages = fleet_pb2.FleetReports(
        reports=[fleet_pb2.FleetReport(order_failed=fleet_pb2.OrderFailed(error="x" * 2_000_000))]
    ).SerializeToString()
    assert (await sent(endpoint, "/headrace.v1.Fleet/Work", pages, stream=True))[0] is grpc.StatusCode.OK
    assert fleet.heard == [1], "preprocessors say more at a time"


async def test_what_a_preprocessor_of_release_0_1_sends_at_most_is_let_in_and_no_more_arrives(serve: Serve) -> None:
    """It puts 256 reports into a message, however large they are."""
    endpoint, _, fleet = await serve("")
    path = "x" * 200
    page = fleet_pb2.ShardsListed(shards=[common_pb2.Shard(url=path, name=path, number=1 << 20)] * PAGE_SHARDS)
    probe = common_pb2.Probe(sample_id=1 << 40, name="x" * 60, num_tokens=9_999, num_targets=9_999, image_patches=[9_999] * 4)
    probed = fleet_pb2.SamplesProbed(probes=[probe] * MOST_SAMPLES)
    for report in (fleet_pb2.FleetReport(shards_listed=page), fleet_pb2.FleetReport(samples_probed=probed)):
        message = fleet_pb2.FleetReports(reports=[report] * MAX_BATCH).SerializeToString()
        assert len(message) > 20 * MIB
        assert (await sent(endpoint, "/headrace.v1.Fleet/Work", message, stream=True))[0] is grpc.StatusCode.OK
    assert fleet.heard == [MAX_BATCH] * 2
    code, details = await sent(endpoint, "/headrace.v1.Fleet/Work", bytes(LARGEST_REQUEST_BYTES + 1), stream=True)
    assert (code, "larger than max" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True), "gRPC says so at its beginning"


@pytest.mark.parametrize("token", ["", "a token that is long enough"])
async def test_a_request_that_grpc_itself_ends_is_a_line_with_its_peer(
    serve: Serve, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, jobs, _ = await serve(token)
    with pytest.raises(
        UserError, match=f"a message of 335544.. bytes to or from {endpoint} is too large, as 33554432 are carried"
    ):
        await submit(endpoint, spec_json="x" * LARGEST_REQUEST_BYTES)
    async with asyncio.timeout(60):
        while not any('reason="too large or cut off"' in record.getMessage() for record in caplog.records):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the caller hears of it first
    (line,) = [text for record in caplog.records if "refused a call" in (text := record.getMessage())]
    assert line.startswith("refused a call method=/headrace.v1.Jobs/Submit peer=ipv4:127.0.0.1:")
    assert f"release={release()} at_most_bytes=33554432" in line
    assert not jobs.calls
    assert not [record for record in caplog.records if record.exc_info]


async def test_of_a_stream_that_nobody_reads_little_arrives(serve: Serve) -> None:
    """A busy service has thousands of them."""
    endpoint, _, fleet = await serve("")
    fleet.listens.clear()
    message = fleet_pb2.FleetReports(reports=[fleet_pb2.FleetReport(order_failed=fleet_pb2.OrderFailed(error="x" * 16_384))])
    async with rpc.aio_channel(endpoint) as channel:
        stream = fleet_pb2_grpc.FleetStub(channel).Work(metadata=rpc.metadata())
        num_sent, is_full = 0, False
        while not is_full:
            writing = asyncio.create_task(stream.write(message))
            is_full = not (await asyncio.wait({writing}, timeout=1.0))[0]
            num_sent += not is_full
            assert num_sent < 32, "of 16 KiB each"
        fleet.listens.set()
        await writing
        await stream.done_writing()
        assert len([reply async for reply in stream]) == num_sent + 1


async def test_a_spec_at_its_limits_is_let_in(serve: Serve) -> None:
    endpoint, _, _ = await serve("")
    sources = [{"name": f"{n:0{MAX_SOURCE_NAME}}", "path": f"{n:0{MAX_PATH}}"} for n in range(MAX_SOURCES)]
    assert await submit(endpoint, spec_json=json.dumps({"sources": sources})) == "j"


@pytest.mark.parametrize(
    ("listen", "is_open"),
    [
        ("127.0.0.1:7070", False),
        ("127.8.9.1:0", False),
        ("localhost:7070", False),
        ("[::1]:7070", False),
        ("0.0.0.0:7070", True),
        ("[::]:7070", True),
        ("10.1.2.3:7070", True),
        ("gpu-7:7070", True),
    ],
)
def test_without_a_token_and_tls_a_service_stays_on_this_machine(listen: str, is_open: bool) -> None:
    def check(**said: bool) -> None:
        usual = dict.fromkeys(("has_token", "tls", "allow_anyone", "allow_plaintext"), False)
        check_exposure(listen, **usual | said)

    for token in ("has_token", "allow_anyone"):
        for wire in ("tls", "allow_plaintext"):
            check(**{token: True, wire: True})
    if not is_open:
        check()
        return
    with pytest.raises(
        UserError, match=r"lets in whoever .* and sends .*--cluster-token-file.*--allow-anyone.*--allow-plaintext"
    ):
        check()
    with pytest.raises(UserError, match=r"--listen .* lets in whoever .*--allow-anyone.*127\.0\.0\.1") as caught:
        check(tls=True)
    assert "--allow-plaintext" not in str(caught.value)
    with pytest.raises(UserError, match=r"--listen .* in the clear.*HEADRACE_TLS.*--allow-plaintext.*127\.0\.0\.1") as caught:
        check(has_token=True)
    assert "--allow-anyone" not in str(caught.value)


@pytest.mark.parametrize("token", ["short", "with blanks in between", "z" * 20 + "\u00e9", "line\nbreak-and-more-of-it"])
async def test_a_token_that_is_none_is_refused(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(UserError, match=r"at least 16 ASCII characters without blanks, got .*openssl rand"):
        cluster_token()


def test_a_token_file_is_made_once_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    file = tmp_path / "secrets" / "token"
    monkeypatch.setenv(TOKEN_FILE, str(file))
    with pytest.raises(UserError, match="cannot read the cluster's token from"):
        cluster_token()
    make_token_file(file)
    first = cluster_token()
    make_token_file(file)
    assert (cluster_token(), len(first), file.stat().st_mode & 0o777) == (first, 64, 0o600)
    assert [path.name for path in file.parent.iterdir()] == ["token"]


def test_a_token_file_is_waited_for_only_where_it_is_missing_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    await_token_file()
    monkeypatch.setenv(TOKEN_FILE, str(file))
    monkeypatch.setenv(TOKEN, SECRET)  # which goes before the file
    await_token_file()
    monkeypatch.delenv(TOKEN)
    assert not caplog.messages
    await_token_file(timeout_s=0.0)
    with pytest.raises(UserError, match="cannot read the cluster's token from"):
        cluster_token()
    file.write_text(SECRET)
    await_token_file()
    assert len(caplog.messages) == 1
