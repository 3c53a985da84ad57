"""Mutual TLS between a client and a gRPC server: who gets an answer, and the sentence for who does not."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from headrace import rpc
from headrace.cli.run.authority import open_authority
from headrace.errors import EndpointError, UnavailableError, UserError
from headrace.handshake import tls_mismatch
from headrace.identity import CHAIN, CLIENT, PREPROCESSOR, REORDER, TLS, Identity
from headrace.jobs_client import JobsClient
from headrace.v1 import jobs_pb2, jobs_pb2_grpc
from tests.papers import expire, make_cluster_papers, serial_number

REQUEST = jobs_pb2.CancelRequest(job="job")


class Recorder(jobs_pb2_grpc.JobsServicer):
    """Records the calls that change something."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    async def Cancel(self, request: jobs_pb2.CancelRequest, _: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:  # noqa: N802
        self.cancelled.append(request.job)
        return jobs_pb2.JobStatus(job=request.job)

    async def List(  # noqa: N802
        self, _request: jobs_pb2.ListRequest, _: grpc.aio.ServicerContext
    ) -> AsyncIterator[jobs_pb2.ListReply]:
        yield jobs_pb2.ListReply(jobs=[jobs_pb2.JobStatus(job="first")])
        while "second" not in self.cancelled:  # noqa: ASYNC110 - polls
            await asyncio.sleep(0.01)
        yield jobs_pb2.ListReply(jobs=[jobs_pb2.JobStatus(job="second")])


@asynccontextmanager
async def serving(identity: Identity | None) -> AsyncIterator[tuple[str, Recorder]]:
    recorder = Recorder()
    add = {rpc.JOBS: lambda server: jobs_pb2_grpc.add_JobsServicer_to_server(recorder, server)}
    server = rpc.Server("127.0.0.1:0", add, identity)
    await server.start()
    try:
        yield server.endpoint, recorder
    finally:
        await server.stop(0)


def cancel(endpoint: str, tls: Path | str) -> str:
    """As `headrace job cancel`."""
    with JobsClient(endpoint, tls=tls) as client:
        return str(client.cancel("job").job)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TLS, raising=False)


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    return make_cluster_papers(tmp_path / "ours")


async def test_a_call_over_tls_is_answered(papers: Path) -> None:
    async with serving(Identity(papers / "reorder")) as (endpoint, recorder):
        for folder in ("client", "trainer", "preprocessor"):
            assert await asyncio.to_thread(cancel, endpoint, papers / folder) == "job"
        assert recorder.cancelled == ["job"] * 3


async def test_a_call_to_several_endpoints_over_tls_is_answered(papers: Path) -> None:
    async with serving(Identity(papers / "reorder")) as (first, _), serving(Identity(papers / "reorder")) as (second, _):
        assert await asyncio.to_thread(cancel, f"{first},{second}", papers / "client") == "job"


async def test_an_asyncio_channel_shows_the_papers_of_the_environment(papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TLS, str(papers / "preprocessor"))
    async with serving(Identity(papers / "reorder")) as (endpoint, _), rpc.aio_channel(endpoint) as channel:
        assert (await jobs_pb2_grpc.JobsStub(channel).Cancel(REQUEST, metadata=rpc.metadata(), timeout=60)).job == "job"


# -- refused ----------------------------------------------------------------------------------------------------------


async def refused(shown: Identity | None, client_tls: Path | str, sentence: str) -> None:
    """Assert that a client is told so, and that nothing of it reached the service."""
    async with serving(shown) as (endpoint, recorder):
        with pytest.raises(EndpointError, match=f"^{sentence.replace('ENDPOINT', endpoint)}[^\n]*$"):
            await asyncio.to_thread(cancel, endpoint, client_tls)
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(cancel_at_once, endpoint, client_tls)
        assert recorder.cancelled == []


def cancel_at_once(endpoint: str, tls: Path | str) -> None:
    """Without waiting for the service first."""
    with rpc.channel(endpoint, tls=tls) as channel:
        rpc.call(jobs_pb2_grpc.JobsStub(channel).Cancel, REQUEST, endpoint, timeout_s=60)


async def test_a_plain_client_is_told_that_the_server_speaks_tls(papers: Path) -> None:
    await refused(
        Identity(papers / "reorder"), "", "ENDPOINT speaks TLS only: name the folder with this process's papers by --tls DIR"
    )


async def test_a_client_with_papers_is_told_that_the_server_speaks_plain_text(papers: Path) -> None:
    await refused(None, papers / "client", "ENDPOINT speaks no TLS: start it with --tls DIR, or leave --tls, HEADRACE_TLS and")


async def test_a_server_of_a_foreign_authority_is_refused(papers: Path, tmp_path: Path) -> None:
    theirs = make_cluster_papers(tmp_path / "theirs")
    await refused(Identity(theirs / "reorder"), papers / "client", "the certificate of ENDPOINT is of no authority in .*ca.crt")


async def test_a_client_of_a_foreign_authority_is_refused(papers: Path, tmp_path: Path) -> None:
    client = make_cluster_papers(tmp_path / "theirs") / "client"
    (client / "ca.crt").write_bytes((papers / "client" / "ca.crt").read_bytes())
    await refused(Identity(papers / "reorder"), client, "ENDPOINT refuses .*tls.crt: it is of no authority in the ca.crt")


async def test_a_preprocessor_cannot_pose_as_the_reorder_service(papers: Path) -> None:
    sentence = f"the certificate of ENDPOINT is that of {PREPROCESSOR}, not of {REORDER}: check the address"
    await refused(Identity(papers / "preprocessor"), papers / "client", sentence)


async def test_a_trainer_cannot_pose_as_a_server(papers: Path) -> None:
    await refused(
        Identity(papers / "trainer"), papers / "client", "the certificate of ENDPOINT is of no authority in .*(purpose|usage)"
    )


async def test_a_server_whose_certificate_has_expired_is_refused(papers: Path) -> None:
    authority, _ = open_authority(papers / "authority", datetime.now(UTC))
    expire(papers / "reorder", authority, REORDER)
    since_before = Identity(papers / "reorder", lambda: datetime.now(UTC) - timedelta(days=1))
    await refused(since_before, papers / "client", "the certificate of ENDPOINT has expired: renew the papers in the folder")


async def test_a_client_whose_certificate_has_expired_is_refused(papers: Path) -> None:
    authority, _ = open_authority(papers / "authority", datetime.now(UTC))
    expire(papers / "client", authority, CLIENT)
    since_before = Identity(papers / "client", lambda: datetime.now(UTC) - timedelta(days=1))
    async with serving(Identity(papers / "reorder")) as (endpoint, _):
        reason = await asyncio.to_thread(tls_mismatch, endpoint, since_before, REORDER)
    assert reason.startswith(f"{endpoint} refuses {papers / 'client' / CHAIN}, which expired at ")
    with pytest.raises(UserError, match=r"tls.crt expired at"):
        rpc.channel(endpoint, tls=papers / "client")


async def test_who_shows_no_certificate_is_let_in_nowhere(papers: Path) -> None:
    authorities = (papers / "client" / "ca.crt").read_bytes()
    async with serving(Identity(papers / "reorder")) as (endpoint, recorder):

        def cancel_without() -> None:
            options = [("grpc.ssl_target_name_override", REORDER)]
            with grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(authorities), options=options) as channel:
                rpc.call(jobs_pb2_grpc.JobsStub(channel).Cancel, REQUEST, endpoint, timeout_s=60)

        with pytest.raises(UnavailableError):
            await asyncio.to_thread(cancel_without)
        assert recorder.cancelled == []


async def test_who_does_not_answer_at_all_is_no_matter_of_tls(papers: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        for own in (None, Identity(papers / "client")):
            assert await asyncio.to_thread(tls_mismatch, endpoint, own, REORDER) == ""


def test_who_resets_connections_is_not_taken_for_one_that_speaks_tls(papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between connecting and the handshake, of which there is none then."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connect = socket.create_connection

        def connect_and_be_reset(*args: Any, **options: Any) -> socket.socket:
            connection = connect(*args, **options)
            with listener.accept()[0] as far:
                far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                far.shutdown(socket.SHUT_WR)
            return connection

        monkeypatch.setattr(socket, "create_connection", connect_and_be_reset)
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        for own in (None, Identity(papers / "client")):
            assert tls_mismatch(endpoint, own, REORDER) == ""


# -- renewal ----------------------------------------------------------------------------------------------------------


async def test_a_server_takes_up_new_papers_and_clients_with_old_and_new_ones_are_answered(papers: Path, tmp_path: Path) -> None:
    old = shutil.copytree(papers / "client", tmp_path / "old")
    async with serving(Identity(papers / "reorder")) as (endpoint, _):
        assert await asyncio.to_thread(cancel, endpoint, old) == "job"
        first = await asyncio.to_thread(shown_serial, endpoint)
        make_cluster_papers(papers, renew=True)
        for folder in (papers / "client", old):
            assert await asyncio.to_thread(cancel, endpoint, folder) == "job"
        assert await asyncio.to_thread(shown_serial, endpoint) == serial_number(papers / "reorder") != first


async def test_a_server_goes_over_to_another_authority_without_a_restart(papers: Path, tmp_path: Path) -> None:
    own = papers / "client"
    async with serving(Identity(papers / "reorder")) as (endpoint, _):
        assert await asyncio.to_thread(cancel, endpoint, own) == "job"
        for folder in ("authority", "reorder"):
            shutil.rmtree(papers / folder)
        make_cluster_papers(papers)
        assert await asyncio.to_thread(cancel, endpoint, own) == "job"


async def test_a_channel_shows_new_papers_to_calls_that_begin_then_and_streams_go_on(papers: Path) -> None:
    """The authority is another one from then on, so that only who shows the new papers is answered."""
    async with serving(Identity(papers / "reorder")) as (endpoint, recorder):

        def call_before_and_after() -> list[str]:
            with rpc.channel(endpoint, tls=papers / "client") as channel:
                stub = jobs_pb2_grpc.JobsStub(channel)
                listing = stub.List(jobs_pb2.ListRequest(), timeout=60)
                first = next(listing)
                (papers / "authority").rename(papers / "former")
                make_cluster_papers(papers)
                stub.Cancel(jobs_pb2.CancelRequest(job="second"), timeout=60)
                return [job.job for page in (first, *listing) for job in page.jobs]

        assert await asyncio.to_thread(call_before_and_after) == ["first", "second"]
        assert recorder.cancelled == ["second"]


def shown_serial(endpoint: str) -> int:
    """The serial number of the certificate that a server shows now."""
    host, _, port = endpoint.rpartition(":")
    return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, int(port)), timeout=60).encode()).serial_number
