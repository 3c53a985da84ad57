"""Lets the faults of a plan happen to a world, and mends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from headrace import rpc
from headrace.errors import HeadraceError, UnavailableError
from headrace.v1 import jobs_pb2, jobs_pb2_grpc
from tests.simulation.fault_plan import PREPROCESSOR, RANK, Fault
from tests.simulation.fibers import in_fiber, sleep, wait_for
from tests.simulation.trainers import Trainers
from tests.simulation.world import Supervised, World

log = logging.getLogger(__name__)

Mend = Callable[[], None]

MOST_SLOW_S = 3.0  # that a slow store takes for a command
MOST_BACK_S = 30.0  # by which a store that was put back is older: as from an asynchronous replica, or a copy
MOST_AHEAD_S = 30.0  # by which the store's clock jumps
LOST = (0.2, 0.5)  # share of answers lost or commands held back: at least, and as much more at most


class Striking:
    """Schedules faults. `struck` tells what has happened so far, and `mended_s` when the last of it is over."""

    def __init__(self, world: World, trainers: Trainers, job: str, on_put_back: Callable[[], None]) -> None:
        """`on_put_back`: called when the store has become older."""
        self._world, self._trainers, self._job = world, trainers, job
        self._on_put_back = on_put_back
        self.struck: list[Fault] = []
        self.is_clock_disturbed = False
        """Whether the store's clock has jumped, or it was put back: leases are not what they were."""

    def plan(self, faults: tuple[Fault, ...]) -> None:
        for fault in faults:
            self._world.loop.call_at(fault.at_s, self._strike, fault, context=self._world.context)

    def _strike(self, fault: Fault) -> None:
        mend = self._begin(fault)
        self.struck.append(fault)
        log.info("%.3f struck: %s", self._world.loop.time(), fault)

        def over() -> None:
            log.info("%.3f mended: %s", self._world.loop.time(), fault)
            mend()

        self._world.loop.call_later(fault.lasts_s, over, context=self._world.context)

    def _begin(self, fault: Fault) -> Mend:
        if fault.kind.startswith("store"):
            return self._strike_store(fault)
        if fault.kind in ("kill", "end", "hang", "freeze"):
            mends = [self._strike_process(fault.kind, victim) for victim in self._victims(fault)]
            return lambda: [mend() for mend in mends] and None
        if fault.kind in ("cut", "silence", "deafness"):
            return self._strike_wire(fault)
        if fault.kind == "slow network":
            self._world.network.slow_s = 2.0 * fault.amount
            return partial(setattr, self._world.network, "slow_s", 0.0)
        return self._strike_job(fault)

    # -- processes ----------------------------------------------------------------------------------------------------

    def _victims(self, fault: Fault) -> list[Supervised | int]:
        """Processes; a number is a rank's."""
        world = self._world
        leader = world.leader() or world.services[0]
        match fault.target:
            case "leader":
                return [leader]
            case "standby":
                return [service for service in world.services if service is not leader][:1]
            case "services":
                return [*world.services]
            case "preprocessors":
                return [*world.preprocessors]
            case "preprocessor":
                return [world.preprocessors[fault.number % len(world.preprocessors)]]
        return [fault.number % self._trainers.num_ranks]

    def _strike_process(self, kind: str, victim: Supervised | int) -> Mend:
        trainers, world = self._trainers, self._world
        if isinstance(victim, int):
            process = trainers.processes[victim]
            if kind in ("kill", "end"):
                trainers.strike(victim)
                return partial(trainers.again, victim)
            process.pause()
            if kind == "hang":
                world.network.hung(process)
            return process.resume
        if kind == "kill":
            victim.kill()
            return victim.start
        if kind == "end":
            victim.end()
            return victim.start
        victim.pause(keepalive=kind == "freeze")
        return victim.resume

    # -- wires --------------------------------------------------------------------------------------------------------

    def _name(self, role: str, fault: Fault) -> str:
        world = self._world
        leader = (world.leader() or world.services[0]).name
        match role:
            case "leader":
                return leader
            case "standby":
                return next((service.name for service in world.services if service.name != leader), leader)
            case "store":
                return "store"
            case "preprocessor":
                return f"{PREPROCESSOR}-{fault.number % len(world.preprocessors)}"
        return f"{RANK}-{fault.number % self._trainers.num_ranks}"

    def _strike_wire(self, fault: Fault) -> Mend:
        network = self._world.network
        one, other = (self._name(role, fault) for role in fault.target.split("-"))
        if fault.kind == "cut":
            network.cut(one, other)
            return lambda: None
        ways = [(one, other)] if fault.kind == "deafness" else [(one, other), (other, one)]
        for way in ways:
            network.silence(*way)
        return lambda: [network.carry(*way) for way in ways] and None

    # -- the store ----------------------------------------------------------------------------------------------------

    def _strike_store(self, fault: Fault) -> Mend:
        store = self._world.store
        match fault.kind:
            case "store away":
                store.is_away = True
                return partial(setattr, store, "is_away", False)
            case "store hangs":
                store.process.pause()
                return store.process.resume
            case "store slow":
                store.slow_s = MOST_SLOW_S * fault.amount
                return partial(setattr, store, "slow_s", 0.0)
            case "store loses answers":
                store.lose_share = LOST[0] + LOST[1] * fault.amount
                return partial(setattr, store, "lose_share", 0.0)
            case "store holds copies":
                store.hold_share = LOST[0] + LOST[1] * fault.amount
                return partial(setattr, store, "hold_share", 0.0)
            case "store full":
                store.redis.is_full = True
                return partial(setattr, store.redis, "is_full", False)
            case "store read-only":
                store.redis.is_read_only = True
                return partial(setattr, store.redis, "is_read_only", False)
            case "store clock jumps":
                self.is_clock_disturbed = True
                store.clock_ahead_s += (2 * fault.amount - 1) * MOST_AHEAD_S
                return lambda: None
        store.is_away = True  # store put back
        services = self._world.services if fault.target else []
        for service in services:
            service.kill()

        def back() -> None:
            for service in services:
                service.start()
            self.is_clock_disturbed = True
            store.redis.put_back(store.redis.now_s() - fault.lasts_s - MOST_BACK_S * fault.amount)
            store.is_away = False
            self._on_put_back()

        return back

    # -- the job ------------------------------------------------------------------------------------------------------

    def _strike_job(self, fault: Fault) -> Mend:
        """Let somebody reset the job, or pause it and have it go on: one request after the other, until they are answered."""
        endpoint, job, mended = self._world.endpoint, self._job, asyncio.Event()

        def ask(method: str, request: object) -> None:
            while True:
                try:
                    with rpc.channel(endpoint) as channel:
                        rpc.call(getattr(jobs_pb2_grpc.JobsStub(channel), method), request, endpoint)
                    return
                except UnavailableError:
                    sleep(1.0)
                except HeadraceError as err:  # the job is over, or the store has lost it
                    log.info("%s: %s", method, err)
                    return

        def reset() -> None:
            record = self._world.store.redis.data.get(f"headrace:{{{job}}}:job", {})
            step = int(fault.amount * int(record.get("cursor", 0)))
            ask("Reset", jobs_pb2.ResetRequest(job=job, step=step))

        def pause() -> None:
            ask("Pause", jobs_pb2.PauseRequest(job=job, paused=True))
            wait_for(mended.wait())
            for _ in range(3):  # a request that was given up may still be carried out after the next one
                ask("Pause", jobs_pb2.PauseRequest(job=job, paused=False))
                sleep(15.0)

        self._world.new_process("tool").spawn(in_fiber(reset if fault.kind == "reset" else pause))
        return mended.set
