"""Several endpoints: those whose names lead somewhere are taken, and they are looked up again when nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from headrace import leader_channel, rpc
from headrace.errors import EndpointError, UnavailableError
from headrace.leader_channel import look_up, look_up_async
from headrace.v1 import jobs_pb2, jobs_pb2_grpc
from tests.wire import free_ports

Names = dict[str, list[str]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """What the resolver knows of the domain .test, for a test to change."""
    table: Names = {}
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *args: Any, **options: Any) -> Any:
        if not str(host).endswith(".test"):
            return real(host, port, *args, **options)
        if not (addresses := table.get(host)):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [one for address in addresses for one in real(address, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return table


class Named(jobs_pb2_grpc.JobsServicer):
    """Says its name, to those who ask for a job once it may."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def Show(self, request: Any, context: Any) -> jobs_pb2.JobStatus:  # noqa: N802
        if request.job:
            self.asked.set()
            await self.may_answer.wait()
        return jobs_pb2.JobStatus(job=self.name)


@asynccontextmanager
async def serving(host: str, port: int, name: str) -> AsyncIterator[Named]:
    named = Named(name)
    server = rpc.Server(f"{host}:{port}", {"headrace.v1.Jobs": lambda s: jobs_pb2_grpc.add_JobsServicer_to_server(named, s)})
    await server.start()
    try:
        yield named
    finally:
        await server.stop(0)


async def show(channel: grpc.Channel, endpoint: str, job: str = "", timeout_s: float = 5.0) -> str:
    stub = jobs_pb2_grpc.JobsStub(channel)
    reply = await asyncio.to_thread(rpc.call, stub.Show, jobs_pb2.ShowRequest(job=job), endpoint, timeout_s)
    return str(reply.job)


def test_addresses_are_those_of_the_names_that_lead_somewhere(names: Names) -> None:
    names |= {"a.test": ["127.0.0.2"], "b.test": ["127.0.0.3", "127.0.0.4"]}
    assert look_up(["a.test:1", "b.test:2", "gone.test:3"]) == "ipv4:127.0.0.2:1,127.0.0.3:2,127.0.0.4:2"
    names["c.test"] = ["::1"]
    assert look_up(["a.test:1", "c.test:2"]) == "ipv6:[::ffff:127.0.0.2]:1,[::1]:2"
    assert look_up(["[::1]:1", "c.test:2"]) == "ipv6:[::1]:1,[::1]:2"
    assert look_up(["gone.test:1", "lost.test:2"]) == "gone.test:1", "gRPC says why"
    assert asyncio.run(look_up_async(["a.test:1", "gone.test:3"])) == "ipv4:127.0.0.2:1"


async def test_a_name_that_leads_nowhere_does_not_keep_from_the_others(names: Names) -> None:
    (port,) = free_ports(1)
    names["leader.test"] = ["127.0.0.2"]
    endpoint = f"gone.test:{port},leader.test:{port}"
    async with serving("127.0.0.2", port, "leader"):
        with rpc.channel(endpoint) as channel:
            assert await show(channel, endpoint) == "leader"
        async with rpc.aio_channel(endpoint) as channel:
            assert (await jobs_pb2_grpc.JobsStub(channel).Show(jobs_pb2.ShowRequest(), timeout=5.0)).job == "leader"
        assert rpc.reachable_address("0.0.0.0:7", endpoint) == "127.0.0.1:7"


async def test_services_that_move_are_found_under_their_names(names: Names) -> None:
    (port,) = free_ports(1)
    names |= {"a.test": ["127.0.0.2"], "b.test": ["127.0.0.2"]}
    endpoint = f"a.test:{port},b.test:{port}"
    with rpc.channel(endpoint) as channel:
        async with serving("127.0.0.2", port, "before"):
            assert await show(channel, endpoint) == "before"
        names["b.test"] = ["127.0.0.3"]
        async with serving("127.0.0.3", port, "behind"):
            answer = ""
            async with asyncio.timeout(20):
                while not answer:
                    with contextlib.suppress(UnavailableError):  # as a trainer does, which asks again
                        answer = await show(channel, endpoint)
            assert answer == "behind"


@pytest.mark.parametrize("gone", [["a.test"], ["b.test"], ["a.test", "b.test"]], ids=",".join)
async def test_a_resolver_that_is_away_takes_no_working_leader_away(
    gone: list[str], names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_channel, "LOOKUP_S", 0.0)
    (port,) = free_ports(1)
    names |= {"a.test": ["127.0.0.2"], "b.test": ["127.0.0.3"]}
    endpoint = f"a.test:{port},b.test:{port}"
    async with serving("127.0.0.2", port, "leader") as leader:
        with rpc.channel(endpoint) as channel:
            assert await show(channel, endpoint) == "leader"
            waiting = asyncio.create_task(show(channel, endpoint, "slow", 20.0))
            await leader.asked.wait()
            for name in gone:
                del names[name]
            with pytest.raises(UnavailableError):
                await show(channel, endpoint, "slow", 0.2)  # after which the names are looked up
            leader.may_answer.set()
            assert await waiting == "leader"
            assert await show(channel, endpoint) == "leader"


async def test_nobody_waits_for_a_resolver_who_has_a_channel(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_channel, "LOOKUP_S", 0.0)
    (port,) = free_ports(1)
    names |= {"a.test": ["127.0.0.2"], "b.test": ["127.0.0.2"]}
    endpoint, asked, may_answer = f"a.test:{port},b.test:{port}", threading.Event(), threading.Event()

    def getaddrinfo(*_: Any, **__: Any) -> Any:
        asked.set()
        may_answer.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    async with serving("127.0.0.2", port, "leader"):
        with rpc.channel(endpoint) as channel:
            assert await show(channel, endpoint) == "leader"
            monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
            slow = asyncio.create_task(show(channel, endpoint, "slow", 0.2))
            assert await asyncio.to_thread(asked.wait, 10)
            try:
                assert await show(channel, endpoint) == "leader"
            finally:
                may_answer.set()
            with pytest.raises(UnavailableError):
                await slow


async def test_nobody_at_any_of_the_names_is_a_service_that_does_not_answer(names: Names) -> None:
    with pytest.raises(EndpointError, match=r"answers at a\.test:1,b\.test:2: no host name 'a\.test' or 'b\.test' is known"):
        await asyncio.to_thread(rpc.await_reorder_service, "a.test:1,b.test:2", 0.3)
    with rpc.channel("a.test:1,b.test:2") as channel, pytest.raises(UnavailableError, match="does not answer"):
        await show(channel, "a.test:1,b.test:2")
