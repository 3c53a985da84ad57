"""Stacks with one thing wrong each: `headrace doctor` finds it and names the remedy. Real servers, certificates and stores."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest

from headrace import rpc
from headrace.admission import call_metadata
from headrace.cli.doctor.diagnosis import Diagnosis, State
from headrace.cli.doctor.stack import examine_stack
from headrace.cli.run.authority import make_papers, open_authority
from headrace.cluster_token import TOKEN, TOKEN_FILE
from headrace.identity import REORDER, TLS, Identity
from headrace.refusals import RELEASE
from headrace.reorder_service.api.fleet import FleetServicer
from headrace.reorder_service.api.jobs import JobsServicer
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.state import StateStore
from headrace.token_folder import TokenFolder, make_tokens
from headrace.v1 import fleet_pb2, fleet_pb2_grpc, jobs_pb2, jobs_pb2_grpc, payload_pb2_grpc
from tests.papers import expire, make_cluster_papers
from tests.redis_server import RedisServer
from tests.unit.reorder_service.job_world import end, submit

PATIENCE_S = 60
SECRET = "the-secret-of-a-test-cluster"


class OlderJobs(jobs_pb2_grpc.JobsServicer):
    """Of a release that tells nothing of itself."""

    async def List(  # noqa: N802
        self, _request: jobs_pb2.ListRequest, _: grpc.aio.ServicerContext
    ) -> AsyncIterator[jobs_pb2.ListReply]:
        yield jobs_pb2.ListReply()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TLS, TOKEN, TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    return make_cluster_papers(tmp_path / "papers")


def jobs_of(servicer: jobs_pb2_grpc.JobsServicer) -> dict[str, Callable[[grpc.aio.Server], None]]:
    return {rpc.JOBS: lambda server: jobs_pb2_grpc.add_JobsServicer_to_server(servicer, server)}


@asynccontextmanager
async def serving(
    identity: Identity | None = None,
    added: dict[str, Callable[[grpc.aio.Server], None]] | None = None,
    *,
    leads: bool = True,
    **options: Any,
) -> AsyncIterator[str]:
    server = rpc.Server("127.0.0.1:0", jobs_of(OlderJobs()) if added is None else added, identity, **options)
    await server.start(serving=leads)
    try:
        yield server.endpoint
    finally:
        await server.stop(0)


async def examined(endpoint: str) -> list[Diagnosis]:
    return await asyncio.to_thread(examine_stack, endpoint, lambda _: None, 0.0)


async def worst_of(endpoint: str) -> Diagnosis:
    """The one thing that is not well, or the last of what is."""
    found = await examined(endpoint)
    bad = [one for one in found if one.state is not State.OK] or found[-1:]
    assert len(bad) == 1, bad
    return bad[0]


# -- not reached ------------------------------------------------------------------------------------------------------


async def test_a_service_that_is_not_there() -> None:
    with socket.socket() as taken:  # nobody listens, and nobody else can
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        one = await worst_of(endpoint)
    assert (one.state, one.found) == (State.FAULT, "nothing listens there: the connection is refused")
    assert f"`headrace reorder --listen {endpoint}`" in one.remedy


@pytest.mark.parametrize("why", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")])
async def test_a_name_that_is_not_known(why: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(*_: Any, **__: Any) -> NoReturn:
        raise why

    monkeypatch.setattr(socket, "getaddrinfo", not_found)
    one = await worst_of("reorder.cluster:7070")
    assert one.state is State.FAULT
    assert one.found.startswith("the name reorder.cluster is not known here (")
    assert "DNS" in one.remedy


async def test_what_is_no_service_of_headrace() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=hang_up)
        thread.start()
        one = await worst_of(f"127.0.0.1:{listener.getsockname()[1]}")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert one.state is State.FAULT
    assert "is no service of Headrace, or hangs" in one.found


async def test_a_preprocessor_is_taken_for_the_service() -> None:
    added = {
        "headrace.v1.Payload": lambda s: payload_pb2_grpc.add_PayloadServicer_to_server(payload_pb2_grpc.PayloadServicer(), s)
    }
    async with serving(None, added) as endpoint:
        one = await worst_of(endpoint)
    assert (one.state, one.found) == (State.FAULT, f"{endpoint} is a preprocessor, not the reorder service")
    assert "`headrace reorder --listen`" in one.remedy


async def test_a_service_that_stands_by() -> None:
    leadership = Leadership()
    leadership.leader = "10.0.0.1:7070 0123abcd"
    async with serving(None, jobs_of(JobsServicer(leadership)), leads=False) as endpoint:
        one = await worst_of(endpoint)
        assert (one.state, one.found) == (State.FAULT, "this reorder service stands by; 10.0.0.1:7070 leads")
        assert "name all reorder services with --endpoint" in one.remedy
        async with serving() as leader:
            assert (await worst_of(f"{endpoint},{leader}")).check == "release", "one that stands by beside one that leads is well"


# -- TLS --------------------------------------------------------------------------------------------------------------


async def test_tls_is_asked_for_and_not_offered(papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TLS, str(papers / "client"))
    async with serving() as endpoint:
        one = await worst_of(endpoint)
    assert (one.state, one.found) == (State.FAULT, f"{endpoint} speaks no TLS")
    assert one.remedy.startswith("start it with --tls DIR, or leave --tls")


async def test_tls_is_offered_and_not_asked_for(papers: Path) -> None:
    async with serving(Identity(papers / "reorder")) as endpoint:
        one = await worst_of(endpoint)
    assert (one.state, one.found) == (State.FAULT, f"{endpoint} speaks TLS only")
    assert "--tls DIR" in one.remedy


async def test_a_certificate_of_a_foreign_authority(papers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TLS, str(papers / "client"))
    async with serving(Identity(make_cluster_papers(tmp_path / "theirs") / "reorder")) as endpoint:
        one = await worst_of(endpoint)
    assert one.state is State.FAULT
    assert one.found.startswith(f"the certificate of {endpoint} is of no authority in ")
    assert one.remedy == "give both sides papers of the same authority"


async def test_a_certificate_that_has_expired(papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TLS, str(papers / "client"))
    authority, _ = open_authority(papers / "authority", datetime.now(UTC))
    expire(papers / "reorder", authority, REORDER)
    since_before = Identity(papers / "reorder", lambda: datetime.now(UTC) - timedelta(days=1))
    async with serving(since_before) as endpoint:
        one = await worst_of(endpoint)
    assert (one.state, one.found) == (State.FAULT, f"the certificate of {endpoint} has expired")
    assert one.remedy == "renew the papers in the folder that its --tls names"


async def test_own_papers_that_have_expired(papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TLS, str(papers / "client"))
    authority, _ = open_authority(papers / "authority", datetime.now(UTC))
    expire(papers / "client", authority, "client.headrace")
    one = await worst_of("127.0.0.1:1")
    assert (one.check, one.state) == ("own papers", State.FAULT)
    assert "expired at" in one.found
    assert "`headrace certs`" in one.remedy


async def test_certificates_that_run_out_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "brief"
    assert len(list(make_papers(folder, 10))) == 5
    monkeypatch.setenv(TLS, str(folder / "client"))
    async with serving(Identity(folder / "reorder")) as endpoint:
        found = {one.check: one for one in await examined(endpoint)}
    for check in ("own papers", "TLS"):
        assert found[check].state is State.WARNING
        assert found[check].found.endswith("UTC, in 9 days")
        assert "`headrace certs`" in found[check].remedy
    assert found["service"].state is State.OK


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "brought"), [("", "none"), ("another-secret-of-somebody", "another one")])
async def test_a_wrong_token(own: str, brought: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, own)
    async with serving(token=SECRET) as endpoint:
        one = await worst_of(endpoint)
    assert (one.check, one.state) == ("token", State.FAULT)
    assert one.found.endswith(f"this service asks for the cluster's token, and the call brought {brought}")
    assert one.remedy == "give this process the service's by HEADRACE_CLUSTER_TOKEN or HEADRACE_CLUSTER_TOKEN_FILE"


async def test_a_token_of_another_role_is_good_for_its_own_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.name: path for path in make_tokens(tmp_path / "tokens")}
    monkeypatch.setenv(TOKEN_FILE, str(files["preprocess"]))
    async with serving(tokens=TokenFolder(tmp_path / "tokens")) as endpoint:
        one = await worst_of(endpoint)
        assert (one.check, one.state) == ("token", State.WARNING)
        assert one.found.endswith("About takes the role watch, and the call's token has preprocess")
        assert one.remedy.startswith("give this process a token of the file `watch`")
        monkeypatch.setenv(TOKEN_FILE, str(files["watch"]))
        assert (await worst_of(endpoint)).check == "release"


async def test_a_token_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "short")
    one = await worst_of("127.0.0.1:1")
    assert (one.check, one.state) == ("token", State.FAULT)
    assert one.remedy == "make one with `openssl rand -hex 32`"


# -- what the service tells -------------------------------------------------------------------------------------------


async def test_a_service_of_an_older_release() -> None:
    async with serving() as endpoint:
        found = await examined(endpoint)
    assert [one.check for one in found] == [endpoint, "TLS", "service", "token", "release", "jobs"]
    assert (found[4].state, found[4].found) == (
        State.WARNING,
        "the service is of an older release, which tells nothing of itself",
    )
    assert "upgrad" in found[4].remedy


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[tuple[ReorderService, str, RedisServer]]:
    """A reorder service with a Redis of its own, which keeps every commit."""
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    server.start()
    service = ReorderService(await StateStore.open(server.url))
    await service.store.database.lead("127.0.0.1:7070 test")
    await service.start()
    leadership = Leadership()
    leadership.leader, leadership.active_service = "127.0.0.1:7070 test", service
    leadership.lease_ends_s = time.monotonic() + 3600
    added = {
        **jobs_of(JobsServicer(leadership)),
        "headrace.v1.Fleet": lambda s: fleet_pb2_grpc.add_FleetServicer_to_server(FleetServicer(leadership), s),
    }
    async with serving(None, added) as endpoint:
        yield service, endpoint, server
    await end(service)
    server.kill()


@asynccontextmanager
async def connected(service: ReorderService, endpoint: str, release: str, ahead_s: float) -> AsyncIterator[None]:
    """A preprocessor of that release, whose clock is ahead."""
    over = asyncio.Event()

    async def reports() -> AsyncIterator[fleet_pb2.FleetReports]:
        said = fleet_pb2.Hello(preprocessor="old", endpoint="p:1", slots=4, instance="i", clock_s=time.time() + ahead_s)
        yield fleet_pb2.FleetReports(reports=[fleet_pb2.FleetReport(hello=said)])
        await over.wait()

    said = [(key, release if key == RELEASE else value) for key, value in call_metadata("")]
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stream = fleet_pb2_grpc.FleetStub(channel).Work(reports(), metadata=said)
        async with asyncio.timeout(PATIENCE_S):
            while not service.fleet.members:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield
        over.set()
        stream.cancel()


async def test_a_store_that_forgets_and_no_preprocessor(service: tuple[ReorderService, str, RedisServer]) -> None:
    reorder, endpoint, _ = service
    found = {one.check: one for one in await examined(endpoint)}
    assert found["store"].found == "Redis; every commit is on its disk before it counts"
    assert found["clocks"].state is found["release"].state is State.OK
    assert (found["preprocessors"].state, found["jobs"].found) == (State.WARNING, "none runs")

    client = reorder.store.database.client
    await client.config_set("appendonly", "no")
    await client.config_set("maxmemory-policy", "allkeys-lru")
    await submit(reorder, join=False)
    found = {one.check: one for one in await examined(endpoint)}
    assert found["store"].state is State.WARNING
    assert "may forget commits (appendonly no, maxmemory-policy allkeys-lru)" in found["store"].found
    assert found["store"].remedy == "start Redis with --appendonly yes --maxmemory-policy noeviction"
    assert (found["preprocessors"].state, found["preprocessors"].found) == (
        State.FAULT,
        "none is connected, and jobs wait for one",
    )
    assert found["preprocessors"].remedy == f"start one with `headrace preprocessor --endpoint {endpoint}`"
    assert found["job job"].found.endswith("no preprocessor is connected")


async def test_a_preprocessor_of_another_release_with_another_clock(service: tuple[ReorderService, str, RedisServer]) -> None:
    reorder, endpoint, _ = service
    async with connected(reorder, endpoint, "0.0.9", -3600.0):
        found = {one.check: one for one in await examined(endpoint)}
    assert found["preprocessors"].state is State.OK
    assert found["release of preprocessors"].state is found["clocks of preprocessors"].state is State.WARNING
    assert "old (0.0.9)" in found["release of preprocessors"].found
    assert "docs/upgrading.md" in found["release of preprocessors"].remedy
    assert found["clocks of preprocessors"].found == "differ from the service's: old (60 min behind it)"
    assert "time service" in found["clocks of preprocessors"].remedy


async def test_a_store_that_is_away(service: tuple[ReorderService, str, RedisServer]) -> None:
    _, endpoint, server = service
    server.kill()
    found = await examined(endpoint)
    server.start()
    assert (found[-1].check, found[-1].state) == ("service", State.FAULT)
    assert "the state store refuses or does not answer" in found[-1].found
