"""Headrace's use of gRPC: endpoints, servers with health and reflection, and one mapping of errors."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace import errors, rpc
from headrace.errors import (
    ERROR_OF,
    STATUS_OF,
    ConflictError,
    EndpointError,
    HeadraceError,
    JobFailedError,
    NotFoundError,
    RoleError,
    SpecError,
    SupersededError,
    UnavailableError,
    UserError,
    status_of,
)
from headrace.quarantine import BadSampleError, Reason
from headrace.v1 import jobs_pb2, jobs_pb2_grpc


class Echo(jobs_pb2_grpc.JobsServicer):
    """Raises what the test put there."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.show_calls = 0
        self.streams_left = 0

    @rpc.unary_method
    async def Show(self, request: jobs_pb2.ShowRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:  # noqa: N802
        self.show_calls += 1
        if self.error is not None:
            raise self.error
        return jobs_pb2.JobStatus(job=request.job)

    @rpc.stream_method
    async def Ledger(  # noqa: N802
        self, request: jobs_pb2.LedgerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[jobs_pb2.LedgerEntry]:
        try:
            yield jobs_pb2.LedgerEntry(step=0)
            if self.error is not None:
                raise self.error
        finally:
            self.streams_left += 1


@contextlib.asynccontextmanager
async def serving(listen: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, Echo]]:
    echo = Echo()
    server = rpc.Server(listen, {"headrace.v1.Jobs": lambda s: jobs_pb2_grpc.add_JobsServicer_to_server(echo, s)})
    await server.start()
    try:
        yield server.endpoint, echo
    finally:
        await server.stop(0)


async def show(endpoint: str, job: str = "j") -> jobs_pb2.JobStatus:
    def blocking() -> jobs_pb2.JobStatus:
        with rpc.channel(endpoint) as channel:
            reply: jobs_pb2.JobStatus = rpc.call(jobs_pb2_grpc.JobsStub(channel).Show, jobs_pb2.ShowRequest(job=job), endpoint)
            return reply

    return await asyncio.to_thread(blocking)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:7070", "host.name:0", "[::1]:65535"])
def test_an_endpoint_is_host_and_port(endpoint: str) -> None:
    assert rpc.check_endpoint(endpoint) == endpoint


@pytest.mark.parametrize(
    "endpoint", ["", "7070", ":7070", "host", "host:", "host:port", "host:-1", "host:65536", "host:7²", "http://host:7070"]
)
def test_what_is_no_endpoint_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(EndpointError, match="is not HOST:PORT"):
        rpc.check_endpoint(endpoint)


async def test_a_server_answers_and_reports_health() -> None:
    async with serving() as (endpoint, _):
        assert not endpoint.endswith(":0")
        assert await asyncio.to_thread(rpc.is_serving, endpoint)
        assert (await show(endpoint, "ä")).job == "ä"
    assert not await asyncio.to_thread(rpc.is_serving, endpoint, timeout_s=0.5)


async def test_several_services_are_asked_for_in_one_conversation_with_one_deadline() -> None:
    status = health_pb2.HealthCheckResponse
    async with listening() as (endpoint, connections):  # it never answers
        assert await asyncio.to_thread(rpc.health_of, endpoint, "", rpc.JOBS, timeout_s=0.3) == [None, None]
        assert len(connections) == 1
    server = rpc.Server("127.0.0.1:0", {rpc.JOBS: lambda _: None})
    await server.start(serving=False)
    health = await asyncio.to_thread(rpc.health_of, server.endpoint, "", rpc.JOBS, "headrace.v1.Payload")
    assert health == [status.SERVING, status.NOT_SERVING, None]
    await server.stop(0)


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """An endpoint that says nothing, and the connections to it."""
    connections: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
    try:
        yield "127.0.0.1:{1}".format(*server.sockets[0].getsockname()), connections
    finally:
        server.close()
        for writer in connections:
            writer.close()


async def test_a_server_describes_itself() -> None:
    async with serving() as (endpoint, _), rpc.aio_channel(endpoint) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        reply = await anext(aiter(stub.ServerReflectionInfo(iter([request]))))
        names = {service.name for service in reply.list_services_response.service}
        assert names == {"headrace.v1.Jobs", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="headrace.v1.Jobs")
        reply = await anext(aiter(stub.ServerReflectionInfo(iter([request]))))
        assert reply.file_descriptor_response.file_descriptor_proto


async def test_a_busy_port_is_an_endpoint_error() -> None:
    async with serving() as (endpoint, _):
        with pytest.raises(EndpointError, match=f"cannot listen on {endpoint}"):
            rpc.Server(endpoint, {})


async def test_an_address_of_another_machine_is_an_endpoint_error() -> None:
    with pytest.raises(EndpointError, match=r"cannot listen on 192\.0\.2\.1:0"):
        rpc.Server("192.0.2.1:0", {})


def test_waiting_for_a_service_that_never_comes_ends_in_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(EndpointError, match="no reorder service answers at"):
            rpc.await_reorder_service(f"127.0.0.1:{taken.getsockname()[1]}", timeout_s=0.1)


def test_who_waits_long_for_a_service_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(rpc, "QUIET_S", 0.0)
    monkeypatch.setattr(rpc, "CONNECT_TIMEOUT_S", 0.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EndpointError):
            rpc.await_reorder_service(endpoint, timeout_s=0.2)
    assert [record.getMessage() for record in caplog.records] == [
        f"no reorder service answers at {endpoint} yet; it is waited for, 0 s in all"
    ]


SAME: list[type[HeadraceError]] = [UserError, NotFoundError, ConflictError, SupersededError]


@pytest.mark.parametrize("cls", SAME)
async def test_an_error_arrives_as_what_it_was(cls: type[HeadraceError]) -> None:
    async with serving() as (endpoint, echo):
        echo.error = cls("the sentence, with ü")
        with pytest.raises(cls) as caught:
            await show(endpoint)
        assert type(caught.value) is cls
        assert str(caught.value) == "the sentence, with ü"


@pytest.mark.parametrize(("raised", "arrives"), [(SpecError, UserError), (JobFailedError, HeadraceError)])
async def test_an_error_without_a_status_of_its_own_arrives_as_its_kin(
    raised: type[HeadraceError], arrives: type[HeadraceError]
) -> None:
    async with serving() as (endpoint, echo):
        echo.error = raised("the sentence")
        with pytest.raises(arrives, match="the sentence") as caught:
            await show(endpoint)
        assert type(caught.value) is arrives


async def test_an_error_in_a_stream_arrives_after_what_came_before() -> None:
    async with serving() as (endpoint, echo), rpc.aio_channel(endpoint) as channel:
        echo.error = NotFoundError("gone")
        stream = jobs_pb2_grpc.JobsStub(channel).Ledger(jobs_pb2.LedgerRequest())
        assert (await anext(aiter(stream))).step == 0
        with pytest.raises(NotFoundError, match="gone"), rpc.translated(endpoint):
            await anext(aiter(stream))


async def test_a_stream_that_is_left_is_cleaned_up_at_once() -> None:
    echo = Echo()
    stream: Any = echo.Ledger(jobs_pb2.LedgerRequest(), None)
    await anext(stream)
    await stream.aclose()
    assert echo.streams_left == 1


async def test_a_server_that_is_no_reorder_service_is_not_taken_for_one() -> None:
    server = rpc.Server("127.0.0.1:0", {"headrace.v1.Payload": lambda _: None})
    await server.start()
    assert await asyncio.to_thread(rpc.is_serving, server.endpoint)
    with pytest.raises(EndpointError, match=f"no reorder service answers at {server.endpoint}"):
        await asyncio.to_thread(rpc.await_reorder_service, server.endpoint, 0.1)
    await server.stop(0)


async def test_a_service_that_is_starting_is_waited_for_beyond_the_time_for_one_that_is_not_there(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "QUIET_S", 0.0)
    server = rpc.Server("127.0.0.1:0", {"headrace.v1.Jobs": lambda s: jobs_pb2_grpc.add_JobsServicer_to_server(Echo(), s)})
    await server.start(serving=False, starting=True)
    assert not await asyncio.to_thread(rpc.is_serving, server.endpoint)
    nobody = "127.0.0.1:9"
    waiting = asyncio.create_task(asyncio.to_thread(rpc.await_reorder_service, f"{nobody},{server.endpoint}", 0.0))
    while not any("which is starting" in message for message in caplog.messages):
        assert not waiting.done(), "it gave up, as where nobody is there"
        await asyncio.sleep(0.01)
    await server.set_serving(True)
    await server.set_starting(False)
    await waiting
    assert len(caplog.messages) == 1
    assert await asyncio.to_thread(rpc.is_serving, server.endpoint)
    await server.set_serving(False)  # as one that stands by
    with pytest.raises(EndpointError, match="no reorder service answers"):
        await asyncio.to_thread(rpc.await_reorder_service, server.endpoint, 0.0)
    await server.stop(0)


def test_a_first_call_after_another_thread_has_closed_the_channel_is_an_error() -> None:
    channel = rpc.channel("127.0.0.1:1", token="")
    stub = jobs_pb2_grpc.JobsStub(channel)
    channel.close()
    with pytest.raises(ValueError, match="closed channel"):
        stub.Show(jobs_pb2.ShowRequest())


async def test_unavailable_is_tried_again_before_it_is_reported() -> None:
    async with serving() as (endpoint, echo):
        echo.error = UnavailableError("not now")
        with pytest.raises(UnavailableError, match=f"{endpoint} does not answer"):
            await show(endpoint)
        assert echo.show_calls > 1


async def test_nobody_there_is_unavailable_and_another_service_is_an_endpoint_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(UnavailableError, match="does not answer"):
            await show(f"127.0.0.1:{taken.getsockname()[1]}")
    server = rpc.Server("127.0.0.1:0", {})
    await server.start()
    with pytest.raises(EndpointError, match="is not the Headrace service asked for"):
        await show(server.endpoint)
    await server.stop(0)


async def test_a_server_that_does_not_answer_in_time_is_unavailable() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"

        def blocking() -> None:
            with rpc.channel(endpoint) as channel:
                rpc.call(jobs_pb2_grpc.JobsStub(channel).Show, jobs_pb2.ShowRequest(), endpoint, timeout_s=0.2)

        with pytest.raises(UnavailableError):
            await asyncio.to_thread(blocking)


def test_every_error_has_a_status_and_the_tables_agree() -> None:
    for status, cls in ERROR_OF.items():
        if cls in STATUS_OF and status not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
            assert STATUS_OF[cls] is status
    for cls, status in STATUS_OF.items():
        assert issubclass(cls, ERROR_OF[status]) or cls is RoleError, "which only `from_rpc` makes of its status"
    assert status_of(JobFailedError("x")) is grpc.StatusCode.INTERNAL
    assert status_of(BadSampleError(Reason.TOO_LONG, "x")) is grpc.StatusCode.INTERNAL
    assert status_of(EndpointError("x")) is grpc.StatusCode.INVALID_ARGUMENT


def test_the_tree_of_errors_is_drawn_whole() -> None:
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, HeadraceError)]
    assert errors.__doc__ is not None
    assert all(cls.__name__ in errors.__doc__ for cls in classes)


@pytest.mark.parametrize(
    ("listen", "peer", "right"),
    [
        ("127.0.0.1:5", "10.0.0.1:7", lambda a: a == "127.0.0.1:5"),
        ("0.0.0.0:5", "127.0.0.1:7", lambda a: a == "127.0.0.1:5"),
        ("127.0.0.2:5", "127.0.0.1:7", lambda a: a == "127.0.0.2:5"),
    ],
)
def test_a_wildcard_is_told_as_the_address_towards_the_peer(listen: str, peer: str, right: Callable[[str], bool]) -> None:
    assert right(rpc.reachable_address(listen, peer))


def test_no_route_to_the_peer_is_an_endpoint_error() -> None:
    with pytest.raises(EndpointError, match="--advertise"):
        rpc.reachable_address("0.0.0.0:5", "no.such.host.invalid:7")
