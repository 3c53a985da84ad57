"""Timing of what the processes of a pipeline did: an event for every action, and a trace of them for Perfetto."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.measured import MeasuredWork, Ran
from headrace.schedule import Action, Kind
from headrace.trainer.loading.stopwatch import Lap
from headrace.trainer.pipeline.topology import Place

_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class Event:
    """The timing of one action on one process, as seen from the host: work on a GPU counts when it is launched.

    Times are readings of `time.monotonic`, the clock that all processes of a host share.
    """

    place: Place
    action: Action
    start_s: float
    end_s: float
    wait_s: float
    """Seconds of the action that the process waited for messages, mostly at its start."""
    compute_s: float
    """Seconds of the action that the stage computed."""
    data_wait_s: float = 0.0
    """Seconds of the action that the process waited for the data of this action or the next."""

    @property
    def drawn_start_s(self) -> float:
        """Start of the action in a drawing, in which all of its waiting is put before it."""
        return self.start_s + self.wait_s

    @property
    def overhead_s(self) -> float:
        """Seconds of the action spent neither waiting nor computing: bookkeeping, and posting and sending messages."""
        return self.end_s - self.start_s - self.wait_s - self.data_wait_s - self.compute_s


@dataclass(frozen=True, slots=True)
class Recording:
    """The events of one process in one step, in order."""

    events: Sequence[Event]
    unix_s: float
    """Unix time at 0 of the events' clock, which aligns the events of different hosts."""


def measured_work(
    events: Sequence[Event],
    clock_unix_s: float,
    on_gpu: Sequence[Lap[Action]] | None = None,
    reduction: Lap[None] | None = None,
) -> list[MeasuredWork]:
    """Return a stage's actions that computed something, by kind; only its first slice, of tensor and context parallelism, tells
    its own.

    clock_unix_s: Unix time at 0 of the events' clock. `on_gpu`: laps of the device on that clock, any number for each action;
    None: the stage computes on the host, and its events have its times. reduction: the wait for sums of gradients behind them.
    """
    laps: dict[Action, list[Lap[Action]]] = {}
    for lap in on_gpu or ():
        laps.setdefault(lap.key, []).append(lap)
    by_kind: dict[Kind, list[Ran]] = {}
    for event in events:
        if event.compute_s > 0.0 and event.place.slice == 0:
            if on_gpu is None:
                end_s, seconds = event.end_s, event.end_s - event.drawn_start_s - event.data_wait_s
            else:
                of_action = laps.get(event.action, ())
                end_s = max((lap.end_s for lap in of_action), default=event.end_s)
                seconds = sum(lap.end_s - lap.begin_s for lap in of_action)
            ran = Ran(event.action.microbatch, event.action.chunk, end_s - seconds, seconds)
            by_kind.setdefault(event.action.kind, []).append(ran)
    works = [
        MeasuredWork.of(
            ran, clock_unix_s, unit=(place := events[0].place).unit, replica=place.replica, stage=place.stage, kind=kind
        )
        for kind, ran in by_kind.items()
    ]
    if works and reduction is not None:
        begin_s = clock_unix_s + reduction.begin_s - works[-1].origin_unix_s
        works[-1] = replace(works[-1], reduction_begin_s=begin_s, reduction_s=reduction.end_s - reduction.begin_s)
    return works


def duration_s(recordings: Iterable[Recording]) -> float:
    """Return the seconds from the first start to the last end of events of processes on one host; 0 if there are none."""
    events = [event for recording in recordings for event in recording.events]
    return max(event.end_s for event in events) - min(event.start_s for event in events) if events else 0.0


def trace(recordings: Iterable[Recording], *, label: str = "") -> dict[str, Any]:
    """Return the events as a document in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

    It has one process per replica of a unit, one thread per stage (and slice), and one box per action from the end of its
    waiting. A box is named like `F 12`, the forward of microbatch 12; B is a backward, W the weight gradients that it put off.
    Time 0 is the first start. label: prefix of every process's name.
    """
    timed = [(event, recording.unix_s) for recording in recordings for event in recording.events]
    origin_s = min((event.start_s + unix_s for event, unix_s in timed), default=0.0)
    places = list(dict.fromkeys(event.place for event, _ in timed))
    processes = list(dict.fromkeys((place.unit, place.replica) for place in places))
    several_chunks = any(event.action.chunk for event, _ in timed)
    events = [*_names(places, processes, label)]
    for event, unix_s in timed:
        action, place = event.action, event.place
        events.append(
            {
                "ph": "X",
                "name": f"{action.kind.name[0]} {action.microbatch}{f'.{action.chunk}' if several_chunks else ''}",
                "cat": action.kind.name.lower(),
                "pid": processes.index((place.unit, place.replica)),
                "tid": places.index(place),
                "ts": (event.drawn_start_s + unix_s - origin_s) * _US_PER_S,
                "dur": (event.end_s - event.drawn_start_s) * _US_PER_S,
                "args": {"microbatch": action.microbatch, "chunk": action.chunk, "wait_us": event.wait_s * _US_PER_S},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin_unix_s": origin_s, "label": label}}


def _names(places: Sequence[Place], processes: Sequence[tuple[str, int]], label: str) -> Iterator[dict[str, Any]]:
    for number, (unit, replica) in enumerate(processes):
        yield _about("process_name", number, 0, name=f"{label} {unit}, replica {replica}".lstrip())
        yield _about("process_sort_index", number, 0, sort_index=number)
    sliced = any(place.slice for place in places)
    for number, place in enumerate(places):
        process = processes.index((place.unit, place.replica))
        name = f"stage {place.stage}" + (f", slice {place.slice}" if sliced else "")
        yield _about("thread_name", process, number, name=name)
        yield _about("thread_sort_index", process, number, sort_index=number)


def _about(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}
