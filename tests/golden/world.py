"""What a script acts on: a reorder service with its store, and the preprocessors, ranks and nodes that are its clients.

The service is the real one on a real Redis server, called through its servicers. The clients are the script's own: they send
what the script tells them to, as messages of the protocol. What differs from a cluster: calls need no network, time passes only
when the script says so, and the store gets one command at a time, so that every run is the same.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from redis.asyncio import Redis

from headrace.cli.watch.status_lines import status_lines
from headrace.rates import Look, Looks
from headrace.reorder_service.api.fleet import FleetServicer
from headrace.reorder_service.api.jobs import JobsServicer
from headrace.reorder_service.api.membership import MembershipServicer
from headrace.reorder_service.api.sessions import SessionsServicer
from headrace.reorder_service.jobs.stopping import stop_task
from headrace.reorder_service.leadership import Leadership, keep_leading, wait_until_leader
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.state import StateStore
from headrace.v1 import jobs_pb2
from headrace.v1.membership_pb2 import NodesSpec
from tests.golden.data_set import Data
from tests.golden.virtual_time import ScriptLoop

if TYPE_CHECKING:
    from tests.golden.scripted_host import Host
    from tests.golden.scripted_node import Node
    from tests.golden.scripted_preprocessor import Preprocessor
    from tests.golden.scripted_rank import Rank

QUIET = 4  # looks at the store in a row without a command in between; one that is on its way may be missed by two of them
_SESSION = re.compile(r"(/\d+/)[0-9a-f]{12}\b")  # the random end of a session's id


class RefusedError(Exception):
    """The service has ended a call with a status and a sentence."""


class Call:
    """The context of a call, as far as servicers use it."""

    async def abort(self, status: grpc.StatusCode, details: str) -> NoReturn:
        raise RefusedError(f"{status.name}: {details}")

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "unix:"


class World:
    """A reorder service and its clients, in the script's event loop."""

    def __init__(self, store_url: str, loop: ScriptLoop) -> None:
        """`store_url`: that of an empty Redis server which nobody else uses meanwhile."""
        self.loop = loop
        self.data = Data()
        self.preprocessors: dict[str, Preprocessor] = {}
        self.ranks: dict[int, Rank] = {}
        self.hosts: dict[str, Host] = {}
        self.nodes: dict[str, Node] = {}
        self.nodes_spec = NodesSpec()
        self.job = ""
        """The job that commands mean."""
        self._store_url = store_url
        self._observer = Redis.from_url(store_url)
        self._said: list[str] = []
        self._calls: dict[asyncio.Task[str], str] = {}
        self._looks: dict[str, Looks] = {}
        self._terms = 0

    # -- the service --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start a reorder service on the script's store, and have it lead."""
        self._terms += 1
        self._store = await StateStore.open(self._store_url)
        self._store.database._turns = asyncio.Semaphore(1)  # one command at a time
        self.leadership = Leadership()
        name = f"reorder-{self._terms}:7070"
        await wait_until_leader(self._store.database, name, self.leadership)
        service = ReorderService(self._store)
        self._keeping = asyncio.create_task(keep_leading(self._store.database, name, self.leadership, self._serve))
        await service.start()
        self.leadership.active_service = service
        self.jobs, self.fleet = JobsServicer(self.leadership), FleetServicer(self.leadership)
        self.sessions, self.membership = SessionsServicer(self.leadership), MembershipServicer(self.leadership)

    async def _serve(self, serving: bool) -> None:
        """A script's leader never loses its lease but by `stop`."""

    async def stop(self) -> None:
        """End the service. What is in the store stays."""
        service, self.leadership.active_service = self.leadership.service, None
        await stop_task(self._keeping)
        await service.stop()
        await self._store.database.resign(self.leadership.leader)
        await self._store.close()

    async def end(self) -> None:
        """End the service, and all clients with it."""
        await self.settle()  # what is cancelled while it waits for the store may need time to end, and none passes any more
        await self.stop()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            await stop_task(task)
        await self._observer.aclose()

    # -- what a verb does ---------------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        """Print a line below the present commands."""
        self._said.append(_SESSION.sub(r"\1...", line))

    async def call(self, who: str, call: Awaitable[str]) -> None:
        """Await a call to the service, and print what it returns or is refused with, now or once it is answered."""
        task = asyncio.ensure_future(self._outcome(call))
        self._calls[task] = who
        await self.settle()
        if not task.done():
            self.say(f"{who}: waits")

    async def change_job(self, method: Callable[[Any, Call], Awaitable[Any]], request: Any) -> None:
        """Call a method that changes the job, and print only what it is refused with."""

        async def change() -> str:
            await method(request, Call())
            return ""

        await self.call(f"job {self.job}", change())

    async def _outcome(self, call: Awaitable[str]) -> str:
        try:
            return await call
        except RefusedError as err:
            return str(err)

    async def settle(self) -> None:
        """Wait until the service and its clients have done all that they can do without further time."""
        quiet, commands = 0, 0
        while quiet < QUIET:
            await self.loop.run_ready()
            before, commands = commands, int((await self._observer.info("stats"))["total_commands_processed"])
            quiet = quiet + 1 if commands == before + 1 else 0

    async def settle_clients(self) -> None:
        """Wait until the clients have done all that they can do, while there is no service."""
        await self.loop.run_ready()

    async def pass_s(self, seconds: float) -> None:
        """Let time pass, from each timer to the next."""
        end_s = self.loop.now_s + seconds
        while self.loop.now_s < end_s:
            self.loop.now_s = max(self.loop.now_s, min(end_s, self.loop.next_timer_s()))
            await self.settle()

    async def printed(self) -> list[str]:
        """Return the lines to print now, and the answers to calls that have waited."""
        await self.settle()
        for task in [task for task in self._calls if task.done()]:
            who, answer = self._calls.pop(task), task.result()
            if answer:
                self.say(f"{who}: {answer}")
        said, self._said = self._said, []
        return said

    # -- what there is ------------------------------------------------------------------------------------------------

    async def status_lines(self) -> list[str]:
        """Return what `headrace top --plain` prints of all jobs. Rates are those since the last time that this was called."""
        pages = [page async for page in self.jobs.List(jobs_pb2.ListRequest(), Call())]
        statuses = [status for page in pages for status in page.jobs if status.spec_json]
        for status in statuses:
            self._looks.setdefault(status.job, Looks()).add(Look(at_s=self.loop.now_s, status=status))
        return list(status_lines([self._looks[status.job].held for status in statuses]))
