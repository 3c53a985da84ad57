"""The clock of one process's actions in one step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from headrace.measured import MeasuredWork
from headrace.schedule import Action
from headrace.trainer.loading.stopwatch import Stopwatch, clock_origin_s
from headrace.trainer.pipeline.events import Event, Recording, measured_work
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.pipeline.topology import Place
from headrace.trainer.rank_progress import PROGRESS


class ActionClock:
    """Times the actions of a step, and in each of them the waiting and the computing."""

    def __init__(self, place: Place, wire: Wire, device: torch.device) -> None:
        self._place = place
        self._wire = wire
        self._laps = Stopwatch[Action](on_gpu=True) if device.type == "cuda" else None
        self._reduction = Stopwatch[None](on_gpu=device.type == "cuda")
        self._events: list[Event] = []
        self.computing = _Blocks(self._laps)
        """Counts the blocks in it as computation of the present action."""
        self.waiting_for_data = _Blocks()
        """Counts the blocks in it as waiting for the data of a portion."""

    @contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        """Time the block as an action."""
        self.computing.action = action
        PROGRESS.begin(action)
        waited_s, data_wait_s, computed_s = self._wire.waited_s, self.waiting_for_data.total_s, self.computing.total_s
        start_s = time.monotonic()
        yield
        self._events.append(
            Event(
                self._place,
                action,
                start_s,
                time.monotonic(),
                self._wire.waited_s - waited_s,
                self.computing.total_s - computed_s,
                self.waiting_for_data.total_s - data_wait_s,
            )
        )

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Time the block as the wait for the sums of gradients, once the device has done all actions."""
        self._reduction.start()
        yield
        self._reduction.stop(None)

    def recording(self) -> Recording:
        """Return the events so far."""
        return Recording(self._events, clock_origin_s())

    def work(self) -> Sequence[MeasuredWork]:
        """Return what was measured of actions and reduction. On a GPU these are times of the device, and this waits for it."""
        on_gpu = None if self._laps is None else self._laps.laps()
        return measured_work(self._events, clock_origin_s(), on_gpu, next(iter(self._reduction.laps()), None))

    def mark(self) -> None:
        """Note that the device has done all actions, as behind the reading of the loss (`Stopwatch.mark`)."""
        if self._laps is not None:
            self._laps.mark()


class _Blocks:
    """A context for one block after the other, which adds up their seconds on the host."""

    action: Action
    """The action of the present block; only where there are laps."""

    def __init__(self, laps: Stopwatch[Action] | None = None) -> None:
        """`laps`: gets a lap for each block."""
        self.total_s = 0.0
        self._laps = laps
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.monotonic()
        if self._laps is not None:
            self._laps.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._laps is not None and kind is None:
            self._laps.stop(self.action)
        self.total_s += time.monotonic() - self._began_s
