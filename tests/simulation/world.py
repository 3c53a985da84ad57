"""The simulated cluster: a store, reorder services, preprocessors and trainer ranks, and the operator who starts them again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from headrace import rpc
from headrace.errors import HeadraceError
from headrace.preprocessor import engine, known_jobs
from headrace.reorder_service import leadership, tidying
from headrace.reorder_service import server as reorder_server
from headrace.reorder_service import service as service_module
from headrace.reorder_service.fleet.member import Work
from headrace.reorder_service.jobs import part_decoding
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store import redis_database
from headrace.trainer.loading import relay, relay_stream, session
from tests.simulation import determinism, fibers, remembered
from tests.simulation.data_set import SimulatedJobWork, list_shards
from tests.simulation.network import Network
from tests.simulation.replacing import replaced
from tests.simulation.simulated_channel import BlockingChannel, SimulatedChannel
from tests.simulation.simulated_preprocessor import run_preprocessor
from tests.simulation.simulated_relay import BlockingServer, SimulatedPlace
from tests.simulation.simulated_server import SimulatedServer
from tests.simulation.store_link import StoreClient, StoreServer
from tests.simulation.virtual_loop import PROCESS, Process, VirtualLoop

STEPS_PER_PAGE = 3  # of a ledger: pages come and go in a job of some steps
RESTART_S = 1.0  # after which a process that has ended by itself is started again

log = logging.getLogger(__name__)


class Supervised:
    """A process that is started again when it ends, unless it was struck down: then whoever did that starts it again."""

    def __init__(self, world: World, name: str, main: Callable[[Process], Awaitable[None]]) -> None:
        self.name = name
        self.process: Process | None = None
        self.ended: list[str] = []
        """Why it has ended by itself, each time."""
        self._world = world
        self._main = main
        self._task: asyncio.Task[Any] | None = None
        self._is_wanted = False

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.is_alive

    def start(self) -> None:
        self._is_wanted = True
        if not self.is_up:
            self.process = self._world.new_process(self.name)
            self._task = self.process.spawn(self._run(self.process))

    def kill(self) -> None:
        """Kill it, as SIGKILL does. It stays down until `start`."""
        self._is_wanted = False
        if self.process is not None and self.process.is_alive:
            self._gone(self.process)

    def end(self) -> None:
        """End it, as SIGTERM does: it may put things in order first. It stays down until `start`."""
        self._is_wanted = False
        if self._task is not None:
            self._task.cancel()

    def pause(self, *, keepalive: bool) -> None:
        """Stop it for a while, as SIGSTOP does. `keepalive`: its connections seem alive, as where only its own code hangs."""
        if self.process is not None and self.process.is_alive:
            self.process.pause()
            if not keepalive:
                self._world.network.hung(self.process)

    def resume(self) -> None:
        if self.process is not None and self.process.is_alive:
            self.process.resume()

    async def _run(self, process: Process) -> None:
        try:
            await self._main(process)
            self.ended.append("it ended")
        except asyncio.CancelledError:
            pass
        except Exception as err:
            if self._world.loop.is_closed():
                return
            self.ended.append(f"{type(err).__name__}: {err}")
            log.info("%.3f %s ended: %s", self._world.loop.time(), self.name, self.ended[-1])
        self._gone(process)
        if self._is_wanted:
            self._world.loop.call_later(RESTART_S, self.start, context=self._world.context)

    def _gone(self, process: Process) -> None:
        process.kill()
        self._world.network.died(process)


class World:
    """All parts of one simulation. Only within `running` do they work."""

    def __init__(self, seed: int, *, services: int = 2, preprocessors: int = 2, host_ranks: int = 0) -> None:
        """`host_ranks`: ranks of a host, which share a relay; 0: each has a stream of its own."""
        self.seed = seed
        self._host_ranks = host_ranks
        self.loop = VirtualLoop(self.random("threads"))
        self.context = Process("simulation", self.loop).context
        self.network = Network(self.loop, self.random("network"))
        self.store = StoreServer(Process("store", self.loop), self.network, self.random("store"))
        self._leaderships: dict[Process, Leadership] = {}
        self.servers: list[SimulatedServer] = []
        self.services = [self._service(number) for number in range(services)]
        self.preprocessors = [self._preprocessor(number) for number in range(preprocessors)]
        self.endpoint = ",".join(_service_endpoint(number) for number in range(services))
        self._boots = self.random("boots")

    def random(self, what: str) -> Random:
        """A source of random numbers of its own for each purpose, so that one more draw of one moves no other."""
        return Random(f"{self.seed} {what}")

    def new_process(self, name: str) -> Process:
        return Process(name, self.loop, booted_s=self._boots.uniform(10.0, 1e6))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Put the simulated parts in the places of the real ones."""

        def channel(target: str, *_: Any, **__: Any) -> BlockingChannel:
            return BlockingChannel(SimulatedChannel(self.network, target))

        def add_health(servicer: Any, of: SimulatedServer) -> None:
            of.health = servicer
            add_health_to_server(servicer, of)

        add_health_to_server = health_pb2_grpc.add_HealthServicer_to_server
        options = redis_database._client_options
        with ExitStack() as stack:
            for target, name, ours in (
                (grpc.aio, "server", self._server),
                (grpc.aio, "insecure_channel", lambda target, options=None: SimulatedChannel(self.network, target)),
                (health_pb2_grpc, "add_HealthServicer_to_server", add_health),
                (rpc, "channel", channel),
                (rpc.reflection, "enable_server_reflection", lambda _names, _server: None),
                (grpc, "server", lambda _executor, options: self._blocking_server()),
                (session, "threading", fibers.Threading),
                (session, "is_relayed", lambda: self._host_ranks > 0),
                (session, "RelayPlace", self._relay_place),
                (relay, "threading", fibers.Threading),
                (relay, "queue", fibers),
                (relay_stream, "threading", fibers.Threading),
                (relay_stream, "queue", fibers),
                (relay_stream, "Future", fibers.Future),
                (redis_database, "_client", lambda _url: StoreClient(self.store, options())),
                (reorder_server, "_warm_up", _nothing),
                (reorder_server, "print", _quiet),
                (reorder_server, "gc", SimpleNamespace(freeze=lambda: None, set_threshold=lambda *_: None)),
                (reorder_server, "Leadership", self._leadership),
                (leadership, "run_in_own_loop", lambda work: work()),
                (reorder_server, "_set_up_gauges", lambda _leadership: None),
                (PlannedStep, "make_plan", remembered.make_plan),
                (service_module, "load_spec_json", remembered.spec_of),
                (tidying, "steps_per_page", lambda _global_batch: STEPS_PER_PAGE),
                (part_decoding, "LOTS_PER_MEMBER", 0),  # a step has too few parts for several lots a member
                (engine, "list_shards", list_shards),
                (known_jobs, "JobWork", SimulatedJobWork),
                (Work, "__hash__", lambda work: hash(work.priority)),  # sets of works are walked through
            ):
                stack.enter_context(replaced(target, name, ours))
            stack.enter_context(determinism.simulating(self.loop, self.seed, fibers.sleep))
            yield

    def run_until(self, is_over: Callable[[], bool], deadline_s: float, every_s: float = 0.25) -> bool:
        """Let time pass until `is_over`, looked at every so often; False where the deadline passes before."""

        async def watch() -> bool:
            while not is_over():
                if self.loop.time() > deadline_s:
                    return False
                await asyncio.sleep(every_s)
            return True

        return self.loop.run_until_complete(self.context.run(asyncio.ensure_future, watch(), loop=self.loop))

    def close(self) -> None:
        """Drop all that still runs, without letting it do anything."""
        self.loop.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what they begin while they end is awaited by nobody
            for task in self.loop.pending_tasks():
                coroutine = task.get_coro()
                task._log_destroy_pending = False
                with contextlib.suppress(BaseException):
                    coroutine.close()

    # -- what processes run -------------------------------------------------------------------------------------------

    def _server(self, options: Any = (), interceptors: Any = ()) -> SimulatedServer:
        self.servers.append(SimulatedServer(self.network, interceptors))
        return self.servers[-1]

    def _blocking_server(self) -> BlockingServer:
        server = BlockingServer(self.network)
        self.servers.append(server)
        return server

    def _relay_place(self, endpoint: str, _token: str | None, _tls: object = None) -> SimulatedPlace:
        process = PROCESS.get()
        assert process is not None
        host = int(process.name.rpartition("-")[2]) // self._host_ranks
        return SimulatedPlace(self.network, f"unix:/host-{host}", endpoint)

    def _leadership(self) -> Leadership:
        leadership, process = Leadership(), PROCESS.get()
        assert process is not None
        self._leaderships[process] = leadership
        return leadership

    def _service(self, number: int) -> Supervised:
        async def main(_process: Process) -> None:
            await reorder_server.serve(_service_endpoint(number), "redis://simulated:6379/0")

        return Supervised(self, f"reorder-{number}", main)

    def _preprocessor(self, number: int) -> Supervised:
        endpoint = f"10.0.1.{number + 1}:7080"
        return Supervised(self, f"preprocessor-{number}", lambda _process: run_preprocessor(number, endpoint, self.endpoint))

    def leader(self) -> Supervised | None:
        """A reorder service that serves as the leader; None where none does."""
        return next((actor for actor in self.services if self.serving(actor) is not None), None)

    def serving(self, actor: Supervised) -> ReorderService | None:
        """What a reorder service serves with at present; None where it does not lead, or knows that it may not."""
        process = actor.process
        if process is not None and process.is_alive and process in self._leaderships:
            if self._leaderships[process].active_service is None:
                return None
            with contextlib.suppress(HeadraceError):
                found: ReorderService = process.context.copy().run(lambda: self._leaderships[process].service)
                return found
        return None


def _service_endpoint(number: int) -> str:
    return f"10.0.0.{number + 1}:7070"


async def _nothing() -> None:
    pass


def _quiet(*_: Any, **__: Any) -> None:
    pass
