"""The processes of an emulated pipeline on this machine, started and fed with one planned step after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from headrace.child_process import last_words, with_parent_death_signal
from headrace.cli.planning.outcome import Outcome
from headrace.cli.planning.tracks import Tracks, tracks_of_places
from headrace.errors import HeadraceError
from headrace.execution_spec import NESTED
from headrace.plan import LLM, Predicted
from headrace.reorder_service.planning.batch import Batch
from headrace.reorder_service.planning.simulation.simulator import Timeline
from headrace.schedule import Action, Kind
from headrace.trainer.pipeline.events import Event, Recording, duration_s
from headrace.trainer.pipeline.topology import PipelineTopology, UnitTopology

START_S = 120.0  # time limit for the processes, which may share a core, to start and to join the process group
HANG_FACTOR = 10.0  # a step that takes so many times as long as predicted counts as hanging


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """What the processes of an emulated pipeline did in one step."""

    recordings: Sequence[Recording]
    """The recordings of all places of the processes, by rank."""
    num_processes: int
    asked_s: float
    """Seconds that all processes together were to sleep."""
    slept_s: float
    """Seconds that all processes together actually slept."""

    @property
    def iteration_s(self) -> float:
        """Seconds from the start of the first action to the end of the last one, of all processes."""
        return duration_s(self.recordings)

    @property
    def oversleep(self) -> float:
        """The share by which sleeps were too long, relative to the seconds asked for."""
        return self.slept_s / self.asked_s - 1 if self.asked_s else 0.0

    @property
    def overheads_s(self) -> list[float]:
        """The overhead of every action of all processes: see `headrace.trainer.pipeline.events.Event.overhead_s`."""
        return [event.overhead_s for recording in self.recordings for event in recording.events]

    def timeline(self, outcome: Outcome) -> tuple[Timeline, Tracks]:
        """Return the measured actions in the form of the simulator's timeline, without a critical path and memory, and their
        tracks. Of ranks that always act together, only the first one's are there.
        """
        stages, together = outcome.plan.topology.stages, outcome.shared.sharing.cell if outcome.shared else 1
        first = dict(zip(stages, np.cumsum([0, *stages.values()]).tolist(), strict=False))
        events = [event for recording in self.recordings for event in recording.events]
        origin_s = min((event.start_s for event in events), default=0.0)
        events = [event for event in events if event.place.slice % together == 0]
        whole = [
            (
                *(e.place.replica, first[e.place.unit] + e.place.stage, e.place.slice),
                *(e.action.microbatch, e.action.kind, e.action.chunk),
            )
            for e in events
        ]
        replica, stage, slices, microbatch, kind, chunk = np.array(whole, np.int64).reshape(-1, 6).T
        timeline = Timeline(
            replica=replica,
            stage=stage,
            microbatch=microbatch,
            kind=kind,
            chunk=chunk,
            start_s=np.array([event.drawn_start_s - origin_s for event in events]),
            end_s=np.array([event.end_s - origin_s for event in events]),
            critical=np.zeros(len(events), np.bool_),
            memory_after=np.zeros(len(events)),
        )
        return timeline, tracks_of_places(outcome, timeline, slices)

    def to_predicted(self, outcome: Outcome) -> Predicted:
        """Return the measured time, idle share and lower bound in the form of the simulator's prediction."""
        iteration_s = self.iteration_s
        bubble = max(0.0, 1 - self.slept_s / (self.num_processes * iteration_s)) if iteration_s else 0.0
        return Predicted(iteration_s=iteration_s, bubble=bubble, lower_bound_s=min(iteration_s, outcome.predicted.lower_bound_s))


class EmulatedRanks:
    """The processes of an emulated pipeline, one for each stage of each replica.

    They end with the `with` block, and when this process ends.
    """

    def __init__(self, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-emulate-")
        self._ranks = [self._start(rank, count) for rank in range(count)]

    def _start(self, rank: int, count: int) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "headrace.cli.planning.emulated_rank",
            str(rank),
            str(count),
            str(Path(self._folder.name) / "store"),
        ]
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                with_parent_death_signal(command, signal.SIGKILL),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # the terminal's Ctrl-C reaches this process only, which then ends them
            )

    def run(self, outcome: Outcome) -> MeasuredStep:
        """Run a planned step on the processes and return what they measured.

        Every sample's forward takes the time that it costs in the outcome's batch, in seconds. Raises HeadraceError if a process
        ends or takes far longer than predicted.
        """
        topology = pipeline_of(outcome.batch)
        line = json.dumps(_document(outcome, topology)) + "\n"
        for number, rank in enumerate(self._ranks):
            assert rank.stdin is not None
            try:
                rank.stdin.write(line)
                rank.stdin.flush()
            except BrokenPipeError as err:
                raise HeadraceError(self._last_words(number)) from err
        deadline_s = time.monotonic() + START_S + HANG_FACTOR * outcome.predicted.iteration_s
        answers = [self._answer(number, deadline_s) for number in range(len(self._ranks))]
        return MeasuredStep(
            recordings=[one for number, answer in enumerate(answers) for one in _recordings(topology, number, answer)],
            num_processes=len(self._ranks),
            asked_s=sum(answer["asked_s"] for answer in answers),
            slept_s=sum(answer["slept_s"] for answer in answers),
        )

    def warm_up(self, outcome: Outcome) -> None:
        """Run the step once without its sleeps, because what the processes do for the first time takes longer."""
        no_costs = np.zeros_like(outcome.batch.costs)
        self.run(dataclasses.replace(outcome, batch=dataclasses.replace(outcome.batch, costs=no_costs)))

    def _answer(self, number: int, deadline_s: float) -> Any:
        stdout = self._ranks[number].stdout
        assert stdout is not None
        if not select.select([stdout], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            raise HeadraceError(
                f"process {number} of the emulated pipeline does not answer: it hangs, or the machine is far too busy"
            )
        line = stdout.readline()
        if not line:
            raise HeadraceError(self._last_words(number))
        return json.loads(line)

    def _log(self, number: int) -> Path:
        return Path(self._folder.name) / f"rank-{number}.log"

    def _last_words(self, number: int) -> str:
        words = last_words(self._log(number).read_text(encoding="utf-8", errors="replace").splitlines())
        return f"process {number} of the emulated pipeline ended: {words}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError), rank:  # closes its pipes
                pass
        self._folder.cleanup()


def pipeline_of(batch: Batch) -> PipelineTopology:
    """Return the topology of the processes for a batch's pipelines: one for every stage of every replica, and for every slice of
    it where units share ranks."""
    execution, sharing = batch.execution, batch.execution.sharing
    slices, guests = (sharing.slices, sharing.guests) if sharing is not None else ({}, frozenset[str]())
    pieces = {} if sharing is None else sharing.pieces
    units = {
        unit: UnitTopology(
            dp=replicas,
            tp=slices.get(unit, 1),
            pp=stages,
            on=LLM if unit in guests else None,
            pieces=pieces.get(unit, 1),
            frozen=execution.backward_factor(unit) == 0,
        )
        for (unit, stages), replicas in zip(batch.topology.stages.items(), batch.unit_replicas, strict=True)
    }
    return PipelineTopology(
        schedule=execution.schedule,
        chunks=execution.chunks,
        in_flight=execution.in_flight,
        sharing=NESTED if sharing is None else sharing.order,
        units=units,
    )


def _document(outcome: Outcome, topology: PipelineTopology) -> dict[str, Any]:
    batch = outcome.batch
    return {
        "topology": topology.model_dump(),
        "plan": outcome.plan.to_json(),
        "sample_ids": batch.sample_ids.tolist(),
        "forward_s": dict(zip(batch.units, batch.costs.tolist(), strict=True)),
        "factors": {unit: batch.execution.factors(unit) for unit in batch.units},
    }


def _recordings(topology: PipelineTopology, rank: int, answer: dict[str, Any]) -> Iterator[Recording]:
    """Yield the recordings of a rank's places."""
    for place, recorded in zip(topology.places(rank), answer["places"], strict=True):
        events = [
            Event(place, Action(kind=Kind(kind), microbatch=microbatch, chunk=chunk), *times)
            for kind, microbatch, chunk, *times in recorded["events"]
        ]
        yield Recording(events, recorded["unix_s"])
