"""From the loss of a node to the next committed step: nodes of `headrace train --nodes`, beside replicas of torchft."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.recovery import overhead, restart
from benchmarks.recovery import torchft as recovery_torchft
from benchmarks.recovery.training import NUM_NODES, REPLICAS, Log, Services, kill
from benchmarks.report import Rival, Row, Section, at_most
from benchmarks.timing import progress
from headrace.processes import Process, ProcessGroup

KILL_GOAL_S, STOP_GOAL_S = 0.5, 2.0
TORCHFT_GOAL = 0.9  # of its median
RAW_GLOO = Rival(value=0.038, source="gloo alone, measured earlier")  # nine groups made anew, on two cores in November 2026
MOMENTS = (0.05, 0.65, 0.35, 0.95, 0.5, 0.2)
"""Of a step, at which nodes of one place after the other are lost, and torchft's replicas too."""
_WARM_STEPS = 2  # after a change, which are none to compare with
_STEPS = 6  # before each loss
_STEPS_LEFT = 4  # after it, before the node is there again


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Of a node, and how training went on."""

    where: str
    step_s: float
    """Median of the steps before, of all nodes."""
    left_step_s: float
    """Median of the steps after it, of the nodes that are left."""
    seconds: float
    """From the signal until the first step of the nodes that are left is committed."""
    noticed_s: float
    """From the signal until they are told."""
    again_s: float
    """From the signal until they train again."""
    phases: Mapping[str, float]

    @property
    def beyond_s(self) -> float:
        """Seconds less a step of the nodes that are left, as torchft's are counted."""
        return self.seconds - self.left_step_s


class Nodes:
    """Of a job without an end."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._job = services.submit("nodes", NUM_NODES // REPLICAS - 1)
        self._processes = services.start_nodes(self._job, NUM_NODES)
        self._logs = [Log(process.log) for process in self._processes]

    def lose(self, number: int, moment: float, how: signal.Signals) -> Loss:
        """Some node at some moment of a step; afterwards it is there again."""
        since_s = self._services.wait(self._complete_since_s)
        times = self._services.await_commits(self._job, _WARM_STEPS + _STEPS + 1, since_s)[_WARM_STEPS:]
        step_s = median(end - begin for begin, end in pairwise(times))
        victim, where = self._places()[number % NUM_NODES]
        self._services.await_commits(self._job, 1, time.time())
        time.sleep(moment * step_s)
        lost_s = time.time()
        os.kill(victim.pid, how)
        recovered = self._services.wait(lambda: self._services.said("recovered", self._job, lost_s))[0]
        committed = self._services.wait(
            lambda: [e for e in self._services.said("committed", self._job, lost_s) if e["step"] >= recovered["step"]]
        )[0]
        left = [committed["time_s"], *self._services.await_commits(self._job, _STEPS_LEFT, committed["time_s"] + 1e-3)]
        told = next(e for e in self._services.said("pipelines", self._job, lost_s) if e["generation"] == recovered["generation"])
        if how == signal.SIGSTOP:
            os.kill(victim.pid, signal.SIGCONT)
        else:
            kill([victim])
            victim.start()
        return Loss(
            where=where,
            step_s=step_s,
            left_step_s=median(end - begin for begin, end in pairwise(left)),
            seconds=committed["time_s"] - lost_s,
            noticed_s=told["time_s"] - lost_s,
            again_s=recovered["time_s"] - lost_s,
            phases={name: recovered[name] for name in ("connect", "agree", "state", "groups")},
        )

    def close(self) -> None:
        kill(self._processes)
        self._services.cancel(self._job)

    def _complete_since_s(self) -> float | None:
        """When all nodes began to train; None where they do not."""
        made = self._services.said("pipelines", self._job)
        recovered = self._services.said("recovered", self._job)
        done = made and recovered and made[-1]["nodes"] == NUM_NODES and recovered[-1]["generation"] == made[-1]["generation"]
        return float(recovered[-1]["time_s"]) if done else None

    def _places(self) -> list[tuple[Process, str]]:
        """Who trains what, in the order of pipelines and stages."""
        own = [[event for event in log.read() if event["event"] == "training"][-1] for log in self._logs]
        found = [(e["pipeline"], e["unit"], e["stage"], n) for n, e in enumerate(own)]
        return [(self._processes[n], f"{unit} {stage} of pipeline {pipeline}") for pipeline, unit, stage, n in sorted(found)]


def sections(*, quick: bool) -> Iterator[Section]:
    """What a loss costs, and what costs it saves."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name)
        torchft = recovery_torchft.rivals(folder, killed=_moments(quick=quick), stopped=_moments(quick=quick)[::2])
        with ProcessGroup() as group:
            services = Services(group, folder)
            killed, stopped = _losses(services, quick=quick)
            yield Section(
                title=f"From the loss of one of {NUM_NODES} nodes to the next committed step, less a step of those left",
                rows=list(_loss_rows(killed, stopped, torchft)),
            )
            recovery_s, step_s = median(loss.seconds for loss in killed), median(loss.step_s for loss in killed)
            rows = restart.faster_rows(services, recovery_s, step_s, quick=quick)
        rows.append(overhead.overhead_row(folder, quick=quick))
        yield Section(title="Nodes of `headrace train --nodes` beside as many ranks of `headrace train --topology`", rows=rows)


def _moments(*, quick: bool) -> Sequence[float]:
    return MOMENTS[:1] if quick else MOMENTS


def _losses(services: Services, *, quick: bool) -> tuple[list[Loss], list[Loss]]:
    """Of nodes that are killed, and of nodes that are stopped."""
    nodes = Nodes(services)
    found: list[list[Loss]] = []
    for how, moments in ((signal.SIGKILL, _moments(quick=quick)), (signal.SIGSTOP, _moments(quick=quick)[::2])):
        found.append([])
        for number, moment in enumerate(moments):
            progress(f"{how.name} of a node, round {number + 1} of {len(moments)}")
            found[-1].append(nodes.lose(number, moment, how))
    nodes.close()
    killed, stopped = found
    return killed, stopped


def _loss_rows(killed: Sequence[Loss], stopped: Sequence[Loss], torchft: Mapping[str, Rival]) -> Iterator[Row]:
    losses = [*killed, *stopped]
    yield Row(name=f"a step of {NUM_NODES} nodes", value=median(loss.step_s for loss in losses), unit="s")
    yield Row(name=f"a step of the {NUM_NODES - 1} that are left", value=median(loss.left_step_s for loss in losses), unit="s")
    again = [loss.again_s for loss in killed]
    yield Row(name="SIGKILL until training again, median", value=median(again), unit="s", rival=RAW_GLOO, detail=_all(again))
    seconds, tuned = [loss.beyond_s for loss in killed], torchft.get("tuned")
    yield Row(
        name=f"SIGKILL, median of {len(killed)}",
        value=median(seconds),
        unit="s",
        rival=tuned,
        goal=at_most(TORCHFT_GOAL * tuned.value) if tuned else None,
        detail=_all(seconds),
    )
    yield _longest("SIGKILL, the longest", killed, torchft.get("default"), KILL_GOAL_S)
    yield _longest(f"SIGSTOP, the longest of {len(stopped)}", stopped, torchft.get("stopped"), STOP_GOAL_S)


def _longest(name: str, found: Sequence[Loss], rival: Rival | None, goal_s: float) -> Row:
    loss = max(found, key=lambda loss: loss.beyond_s)
    phases = {"told": loss.noticed_s, **loss.phases}
    detail = ", ".join(f"{phase} {seconds * 1e3:.0f}" for phase, seconds in phases.items())
    return Row(name=name, value=loss.beyond_s, unit="s", rival=rival, goal=at_most(goal_s), detail=f"{loss.where}: {detail} ms")


def _all(seconds: Sequence[float]) -> str:
    return f"rounds: {', '.join(f'{value:.2f}' for value in seconds)}"
