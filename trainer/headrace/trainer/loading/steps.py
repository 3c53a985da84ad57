"""The items that a step loader yields: one rank's share of a global batch, microbatch by microbatch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from headrace.errors import UserError
from headrace.measured import ALL_UNITS, MeasuredWork, Ran
from headrace.quarantine import Rejected
from headrace.schedule import Kind
from headrace.ticket import step_of
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.stopwatch import Stopwatch, clock_origin_s, uses_gpu
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
    is_filler: bool = False
    """Whether it is an empty one behind those of the plan, so that all ranks have as many (`equal_microbatches`)."""
    _sources: Tensor | None = None

    @property
    def sources(self) -> Tensor:
        """(n,) int64, on the host: the source of each sample of `data.sample_ids`, as its place in `loader.spec.sources`.

        Raises UserError where the reorder service is too old to say.
        """
        if self._sources is None and len(self.data.sample_ids):
            raise not_told("the sources of samples")
        return self._sources if self._sources is not None else torch.zeros(0, dtype=torch.int64)


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """One rank's share of a global batch. Iterate over it once, for its microbatches."""

    index: int
    num_samples: int
    """Number of samples in the whole global batch, over all ranks."""
    num_microbatches: int = 0
    """Number of microbatches that the iteration yields, fillers included."""
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
    _num_targets: int | None = None
    _target_weight: float | None = None
    _max_tokens: int | None = None
    _laps: Stopwatch[tuple[int, int]] = field(default_factory=lambda: Stopwatch(on_gpu=uses_gpu()))
    """The time between a microbatch and the request for the next one, by replica and index."""

    @classmethod
    def of(cls, plan: sessions_pb2.RankPlan, tickets: list[str], *, equal_microbatches: bool = False) -> Self:
        """Return the step of a plan, without its microbatches. `tickets`: those of the parts that this rank takes.
        `equal_microbatches`: have as many as the rank that has most.

        Raises UserError where the reorder service is too old to say how many that are.
        """
        if equal_microbatches and not plan.HasField("most_microbatches"):
            raise not_told("how many microbatches the other ranks have, which equal_microbatches needs")
        return cls(
            index=plan.step,
            num_samples=plan.num_samples,
            num_microbatches=plan.most_microbatches if equal_microbatches else len(plan.microbatches),
            content=plan.content,
            _microbatches=iter(()),
            _tickets=tickets,
            _num_targets=plan.num_targets if plan.HasField("num_targets") else None,
            _target_weight=plan.target_weight if plan.HasField("target_weight") else None,
            _max_tokens=plan.max_tokens if plan.HasField("max_tokens") else None,
        )

    def totals(self) -> sessions_pb2.RankPlan:
        """Return what is told of the whole step, as a plan without microbatches."""
        return sessions_pb2.RankPlan(
            step=self.index,
            num_samples=self.num_samples,
            content=self.content,
            num_targets=self._num_targets,
            target_weight=self._target_weight,
            max_tokens=self._max_tokens,
        )

    @property
    def num_targets(self) -> int:
        """Number of targets of the whole global batch, over all ranks, known before its first microbatch.

        It is of the batch as planned. A sample that turns out to be damaged only when it is decoded (`rejected`) counts here, and
        in no `microbatch.data.num_targets`: their sum over all ranks is smaller by its targets. All ranks are told one number.

        Raises UserError where the reorder service is too old to say.
        """
        if self._num_targets is None:
            raise not_told("the targets of a step")
        return self._num_targets

    @property
    def target_weight(self) -> float:
        """Sum of the weights of these targets, their number where each weighs 1: a denominator of the loss that needs no
        all-reduce.

        Raises UserError as `num_targets`.
        """
        return float(self.num_targets) if self._target_weight is None else self._target_weight

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the largest microbatch of any rank as planned, with the padding of packs: an upper bound.

        Raises UserError where the reorder service is too old to say.
        """
        if self._max_tokens is None:
            raise not_told("the tokens of the largest microbatch")
        return self._max_tokens

    @property
    def _trace(self) -> str:
        """Id of the step in traces, JOB/UID/GENERATION/STEP from its tickets; empty if this rank has no parts of the step."""
        return step_of(self._tickets[0]) if self._tickets else ""

    def __iter__(self) -> Iterator[Microbatch]:
        for microbatch in self._microbatches:
            if microbatch.is_filler:
                yield microbatch
                continue
            self._laps.start()
            yield microbatch
            self._laps.stop((microbatch.replica, microbatch.index))

    def work(self) -> Sequence[MeasuredWork]:
        """Return what was measured of the step. On a GPU this waits for its microbatches."""
        if self.measured is not None:
            return self.measured
        of_replicas: dict[int, list[Ran]] = {}
        for (replica, index), begin_s, end_s in self._laps.laps():
            of_replicas.setdefault(replica, []).append(Ran(index, 0, begin_s, end_s - begin_s))
        clock_unix_s = clock_origin_s()
        return [
            MeasuredWork.of(ran, clock_unix_s, unit=ALL_UNITS, replica=replica, stage=0, kind=Kind.FORWARD)
            for replica, ran in of_replicas.items()
        ]


def sources_in(message: sessions_pb2.RankMicrobatch, sample_ids: Tensor, num_sources: int) -> Tensor | None:
    """Return the (n,) int64 sources of those samples of a microbatch that have arrived; None where the plan does not say them.

    num_sources: those of the job; of a single one nothing needs to be said.
    """
    if num_sources == 1:
        return torch.zeros_like(sample_ids)
    source_of = {i: samples.source for samples in message.sources for i in samples.sample_ids}
    arrived = sample_ids.tolist()
    return torch.tensor([source_of[i] for i in arrived], dtype=torch.int64) if source_of.keys() >= set(arrived) else None


def not_told(what: str) -> UserError:
    """Return the error for something that a reorder service of an older release does not say."""
    return UserError(f"the reorder service is of an older release, which does not say {what}: upgrade it")
