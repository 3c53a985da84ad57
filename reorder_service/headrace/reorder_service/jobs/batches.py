"""Which samples each step of a job has: the global order, cut into global batches."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from headrace.errors import JobFailedError, UserError
from headrace.reorder_service.jobs.counted_shards import CountedShards
from headrace.reorder_service.order.mixture import Mixture
from headrace.sample import SampleRef
from headrace.spec import JobSpec

Changes = tuple[tuple[int, tuple[float, ...]], ...]
"""Changes of the mixture: (first step, weights of all sources in the order of the spec) each."""


def content_of(refs: Sequence[SampleRef]) -> int:
    """Return a digest of the samples of a global batch and of their places in the job: 63 bits, never 0."""
    places = np.array([(ref.sample_id, ref.shard, ref.row) for ref in refs], dtype=np.int64)
    return int.from_bytes(hashlib.blake2b(places.tobytes(), digest_size=8).digest(), "little") >> 1 or 1


class GlobalBatches:
    """The samples of each step of a job. `set_up_order` finds them, as far as the shards are counted.

    A job ends after all epochs of its spec, or after all steps where that is less.
    """

    def __init__(self, spec: JobSpec, manifest: CountedShards, changes: Changes) -> None:
        self.num_steps = 0
        """Number of steps of the job; 0 until it is known.

        It is known at once where `steps` alone ends the job, else when the last shard is counted or those counted so far have
        enough samples for all `steps`.
        """
        self._num_samples = 0
        self._spec = spec
        self._epochs = (spec.epochs or 1) if spec.epochs is not None or spec.steps is None else None
        ends = [source.max_epochs / (source.repetitions or 1) for source in spec.sources if source.max_epochs is not None]
        if self._epochs is None and len(ends) == len(spec.sources):
            self._epochs = math.ceil(max(ends))
        self._limit = None if spec.steps is None else spec.steps * spec.global_batch
        self._manifest = manifest
        self.changes = changes
        """Changes of the mixture; whoever sets them must call `set_up_order` next."""
        self._known_shares: Callable[[int], NDArray[np.float64] | None] = lambda _: None
        self._contents = functools.lru_cache(maxsize=4)(lambda step, _: content_of(self.refs(step)))

    def set_up_order(self) -> None:
        """Set up the order of the shards, and the places of samples as far as the shards are counted.

        Must be called once the shards are listed. Raises JobFailedError where a source has no usable sample.
        """
        size = self._spec.global_batch
        with self._to_be_inspected():
            self._order = self._manifest.order([(step * size, weights) for step, weights in self.changes])
        self._known_shares = self._order.shares
        self._num_samples = self.num_steps = 0
        self._contents.cache_clear()
        self._find_end()

    def to_count(self, step: int, ahead: int = 0) -> list[int]:
        """Return the shards to count next on the way to the samples of a step and of `ahead` further blocks of each source.

        Without `ahead`, an empty list means that the samples are known or that the job has no such step; `knows` tells which.
        Raises JobFailedError where a source has no usable sample.
        """
        if self.num_steps and step >= self.num_steps:
            return []
        ends = [end for end in (self._num_samples, self._limit) if end]
        stop = min([(step + 1) * self._spec.global_batch, *ends])
        with self._to_be_inspected():
            shards = self._order.to_count(stop, None if self.num_steps else self._epochs, ahead)
        if not self.num_steps:
            self._find_end()
        return shards

    def knows(self, step: int) -> bool:
        """Whether the job has the step and its samples are known, so that `refs` can return them."""
        return not self.to_count(step) and not 0 < self.num_steps <= step

    def _find_end(self) -> None:
        if self._limit is not None and (self._epochs is None or self._order.reaches(self._limit, self._epochs)):
            self._num_samples = self._limit
        elif self._epochs is not None and self._order.is_counted:
            self._num_samples = self._order.num_samples(self._epochs)
        self.num_steps = -(-self._num_samples // self._spec.global_batch)

    def refs(self, step: int) -> list[SampleRef]:
        """Return the samples of a step, in the order of their places. The step must be one that `knows` affirms."""
        size = self._spec.global_batch
        stop = (step + 1) * size
        return self._order.refs(step * size, min(stop, self._num_samples or stop))

    def content(self, step: int) -> int:
        """Return `content_of` the samples of a step, which must be one that `knows` affirms."""
        return self._contents(step, self.changes)

    def changed(self, step: int, weights: Mapping[str, float]) -> Changes:
        """Return the changes of the mixture with other weights from `step` on; changes at later steps are dropped.

        Raises UserError where the weights do not name every source, or are invalid.
        """
        names = [source.name for source in self._spec.sources]
        if sorted(weights) != sorted(names):
            raise UserError(f"weights must name every source once: {', '.join(names)}; got {', '.join(weights) or 'none'}")
        changes = (*(change for change in self.changes if change[0] < step), (step, tuple(weights[name] for name in names)))
        try:
            Mixture([1.0] * len(names), changes)
        except ValueError as err:
            raise UserError(str(err)) from err
        endless = [source.name for source in self._spec.sources if source.max_epochs is None]
        if endless and not any(weights[name] for name in endless):
            raise UserError(
                f"weights leave only sources that end by their max_epochs: give one of {', '.join(endless)} a weight above 0"
            )
        return changes

    def shares(self, step: int) -> list[float]:
        """Return each source's share of the samples at a step, in the order of the spec; all 0 before any count."""
        if (known := self._known_shares(step * self._spec.global_batch)) is not None:
            return [float(share) for share in known]
        changed = [weights for first, weights in self.changes if first <= step]
        given = [source.weight for source in self._spec.sources if source.weight is not None]  # of all sources or of none
        weights = changed[-1] if changed else given or self._manifest.num_samples().tolist()
        total = sum(weights) or 1.0
        return [weight / total for weight in weights]

    @contextmanager
    def _to_be_inspected(self) -> Iterator[None]:
        """Turn the ValueError about a source without samples into a JobFailedError that says why, and how to find out more."""
        try:
            yield
        except ValueError as err:
            empty = self._manifest.empty_source()
            if empty is None:
                raise JobFailedError(str(err)) from err
            why = self._manifest.why_empty(empty)
            raise JobFailedError(f"{err}: {why}; `headrace inspect` shows what is wrong with each") from err
