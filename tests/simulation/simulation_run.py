"""One run: a job from its submission to its end, in a world with faults, and what the checkers say of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from headrace import rpc
from headrace.spec import JobSpec
from headrace.v1 import jobs_pb2, jobs_pb2_grpc
from tests.simulation import determinism
from tests.simulation.checkers import Checkers, Expected, ledger_of
from tests.simulation.data_set import job_spec
from tests.simulation.fault_plan import Fault, Setting
from tests.simulation.fibers import in_fiber, sleep
from tests.simulation.striking import Striking
from tests.simulation.trainers import Trainers
from tests.simulation.virtual_loop import StalledError
from tests.simulation.world import World

JOB = "job"
PATIENCE_S = 150.0  # after the last fault is mended, beside the time that the steps take: clients may wait for some timeouts
LOOK_S = 0.5

Faulty = Callable[[], AbstractContextManager[None]]
"""Puts a known fault into the code, for the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run."""

    seed: int
    faults: tuple[Fault, ...]
    violations: tuple[str, ...]
    struck: tuple[str, ...]
    """Names of the faults that happened before the job ended."""
    num_relayed: int
    """Ranks that went by a relay."""
    num_commits: int
    simulated_s: float
    digest: int
    """The same for every run with these faults."""


def run(seed: int, setting: Setting, faults: tuple[Fault, ...], faulty: Faulty = nullcontext) -> Outcome:
    """Run the job of a setting with these faults."""
    expected = undisturbed(setting.ranks, setting.steps, setting.substitute)
    determinism.forget_former_runs()
    with faulty():
        return _run(seed, setting, faults, expected)


def _run(seed: int, setting: Setting, faults: tuple[Fault, ...], expected: Expected) -> Outcome:
    spec = _spec(setting)
    world = World(seed, services=setting.services, preprocessors=setting.preprocessors, host_ranks=setting.host_ranks)
    with world.running():
        trainers = Trainers(world, JOB, setting.ranks, step_s=setting.step_s, together=setting.together)
        striking = Striking(world, trainers, JOB, lambda: checkers.put_back())
        checkers = Checkers(world, trainers, JOB, expected, lambda: not striking.is_clock_disturbed)
        _begin(world, trainers, spec)
        striking.plan(faults)
        has_ended = _await_end(world, trainers, checkers, setting, faults)
        checkers.look_at_errors()
        if has_ended:
            checkers.look_at_end(JOB)
        world.close()
    return Outcome(
        seed=seed,
        faults=faults,
        violations=tuple(checkers.violations),
        struck=tuple(fault.name for fault in striking.struck),
        num_relayed=setting.ranks if setting.host_ranks else 0,
        num_commits=checkers.num_commits,
        simulated_s=world.loop.time(),
        digest=checkers.digest ^ world.loop.num_callbacks,
    )


@functools.cache
def undisturbed(ranks: int, steps: int, substitute: bool) -> Expected:
    """What a run without faults has of the job, which does not depend on its cluster."""
    setting = Setting(
        services=1,
        preprocessors=1,
        ranks=ranks,
        host_ranks=0,
        steps=steps,
        window=2,
        substitute=substitute,
        step_s=(0.1, 0.1),
        together=False,
    )
    world = World(0, services=1, preprocessors=1)
    with world.running():
        trainers = Trainers(world, JOB, ranks, step_s=setting.step_s, together=False)
        _begin(world, trainers, _spec(setting))
        world.run_until(lambda: trainers.are_done or bool(trainers.failed), 300.0)
        assert trainers.are_done, f"a job without faults ends: {trainers.failed or trainers.errors} {world.loop.errors}"
        ids = [frozenset(i for rank in range(ranks) for i in trainers.delivered[rank, step]) for step in range(steps)]
        expected = Expected(
            ledger=tuple(ledger_of(world.store.redis, JOB)),
            quarantine=frozenset(world.store.redis.data.get(f"headrace:{{{JOB}}}:quarantine", {})),
            ids=tuple(ids),
        )
        world.close()
    return expected


def _spec(setting: Setting) -> JobSpec:
    return job_spec(JOB, steps=setting.steps, ranks=setting.ranks, window=setting.window, substitute=setting.substitute)


def _begin(world: World, trainers: Trainers, spec: JobSpec) -> None:
    for actor in (*world.services, *world.preprocessors):
        actor.start()
    submit(world, spec)
    trainers.start()


def submit(world: World, spec: JobSpec) -> None:
    """Have a tool submit the job, which asks until a service takes it, and again where the store has lost it or it failed."""

    def ask() -> None:
        while True:
            try:
                with rpc.channel(world.endpoint) as channel:
                    stub = jobs_pb2_grpc.JobsStub(channel)
                    while True:
                        rpc.call(stub.Submit, jobs_pb2.SubmitRequest(spec_json=spec.to_json()), world.endpoint)
                        sleep(20.0)
            except Exception:
                sleep(0.5)

    world.new_process("tool").spawn(in_fiber(ask))


def _await_end(world: World, trainers: Trainers, checkers: Checkers, setting: Setting, faults: tuple[Fault, ...]) -> bool:
    """Let time pass until the ranks have trained to the job's end, which must come in time; return whether it did."""
    last_s = max((fault.at_s + fault.lasts_s for fault in faults), default=0.0)
    deadline_s = max(last_s, setting.lasts_s) + setting.steps * setting.step_s[1] + PATIENCE_S

    def is_over() -> bool:
        checkers.look()
        if trainers.done and not checkers.is_job_done():
            trainers.train_again(checkers.cursor)
        return trainers.are_done or bool(checkers.violations or trainers.failed)

    try:
        in_time = world.run_until(is_over, deadline_s, LOOK_S)
    except StalledError as err:
        checkers.violations.append(str(err))
        return False
    if checkers.violations or trainers.failed:
        checkers.violations += trainers.failed
        return False
    if not in_time or not trainers.are_done:
        why = trainers.errors[-3:] or "no rank has ended with an error"
        committed = len(ledger_of(world.store.redis, JOB))
        checkers.violations.append(
            f"{world.loop.time():.3f} s: the job does not end: {committed} of {setting.steps} steps are committed, "
            f"{world.loop.time() - last_s:.0f} s after the last fault was mended; {why}"
        )
        return False
    return True
