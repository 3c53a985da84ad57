"""The clock of one process's actions in one step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from headrace.measured import MeasuredWork
from headrace.schedule import Action
from headrace.trainer.loading.stopwatch import Stopwatch
from headrace.trainer.pipeline.events import Event, Recording, clock_origin_s, measured_work
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.pipeline.topology import Place
from headrace.trainer.rank_progress import PROGRESS


class ActionClock:
    """Times the actions of a step, and in each of them the waiting and the computing."""

    def __init__(self, place: Place, wire: Wire, device: torch.device) -> None:
        self._place = place
        self._wire = wire
        self._laps = Stopwatch[Action](on_gpu=True) if device.type == "cuda" else None
        self._events: list[Event] = []
        self._action: Action
        self._data_wait_s = 0.0
        self._computed_s = 0.0

    @contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        """Time the block as an action."""
        self._action = action
        PROGRESS.begin(action)
        waited_s, data_wait_s, computed_s = self._wire.waited_s, self._data_wait_s, self._computed_s
        start_s = time.monotonic()
        yield
        self._events.append(
            Event(
                self._place,
                action,
                start_s,
                time.monotonic(),
                self._wire.waited_s - waited_s,
                self._computed_s - computed_s,
                self._data_wait_s - data_wait_s,
            )
        )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the block as computation of the present action."""
        began_s = time.monotonic()
        if self._laps is not None:
            self._laps.start()
        yield
        if self._laps is not None:
            self._laps.stop(self._action)
        self._computed_s += time.monotonic() - began_s

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the block as waiting for the data of a portion."""
        began_s = time.monotonic()
        yield
        self._data_wait_s += time.monotonic() - began_s

    def recording(self) -> Recording:
        """Return the events so far."""
        return Recording(self._events, clock_origin_s())

    def work(self) -> Sequence[MeasuredWork]:
        """Return what was measured of the actions. On a GPU these are seconds of the device, and this waits for it."""
        return measured_work(self._events, None if self._laps is None else self._laps.seconds())
