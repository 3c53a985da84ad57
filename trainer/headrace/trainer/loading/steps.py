"""The items that a step loader yields: one rank's share of a global batch, microbatch by microbatch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from headrace.measured import ALL_UNITS, MeasuredWork
from headrace.quarantine import Rejected
from headrace.schedule import Kind
from headrace.ticket import step_of
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.stopwatch import Stopwatch
from headrace.v1 import sessions_pb2


@dataclass(slots=True, kw_only=True, eq=False)
class Microbatch:
    """One packed microbatch of one of this rank's replicas.

    The tensors of `data` may be views of memory that a preprocessor on this host shares: read-only, and valid until the step is
    committed or the loader is closed. Copy what is needed for longer.
    """

    replica: int
    index: int
    data: PackedMicrobatch


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """One rank's share of a global batch. Iterate over it once, for its microbatches."""

    index: int
    num_samples: int
    """Number of samples in the whole global batch, over all ranks."""
    content: int = 0
    """Digest of the samples of the whole global batch and of their places in the job; 0: unknown."""
    _microbatches: Iterator[Microbatch]
    _tickets: list[str]
    rejected: list[Rejected] = field(default_factory=list)
    """This rank's samples that turned out to be damaged when decoded; complete once the step has been iterated."""
    consumed: bool = False
    """Whether all of this step's microbatches were handed out."""
    data_wait_s: float = 0.0
    started_s: float = field(default_factory=time.perf_counter)
    measured: Sequence[MeasuredWork] | None = None
    """What was measured of the step, where its microbatches are not iterated over; None: what the loop over them took."""
    _laps: Stopwatch[tuple[int, int]] = field(default_factory=lambda: Stopwatch(on_gpu=_uses_gpu()))
    """The time between a microbatch and the request for the next one, by replica and index."""

    @classmethod
    def of(cls, plan: sessions_pb2.RankPlan, tickets: list[str]) -> Self:
        """Return the step of a plan, without its microbatches. `tickets`: those of the parts that this rank takes."""
        return cls(index=plan.step, num_samples=plan.num_samples, content=plan.content, _microbatches=iter(()), _tickets=tickets)

    @property
    def _trace(self) -> str:
        """Id of the step in traces, JOB/UID/GENERATION/STEP from its tickets; empty if this rank has no parts of the step."""
        return step_of(self._tickets[0]) if self._tickets else ""

    def __iter__(self) -> Iterator[Microbatch]:
        for microbatch in self._microbatches:
            self._laps.start()
            yield microbatch
            self._laps.stop((microbatch.replica, microbatch.index))

    def work(self) -> Sequence[MeasuredWork]:
        """Return what was measured of the step. On a GPU this waits for its microbatches."""
        if self.measured is not None:
            return self.measured
        of_replicas: dict[int, dict[int, float]] = {}
        for (replica, index), lap_s in self._laps.seconds().items():
            of_replicas.setdefault(replica, {})[index] = lap_s
        return [
            MeasuredWork(
                unit=ALL_UNITS,
                replica=replica,
                stage=0,
                kind=Kind.FORWARD,
                microbatches=tuple(seconds),
                seconds=tuple(seconds.values()),
            )
            for replica, seconds in of_replicas.items()
        ]


def _uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
