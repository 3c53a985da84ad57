"""Which samples each step of a job has: the global order, cut into global batches."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.errors import UserError
from headrace.sample import SampleRef
from headrace.spec import JobSpec
from reorder_service.manifest import CountedShards
from reorder_service.mixture import Mixture

Changes = tuple[tuple[int, tuple[float, ...]], ...]
"""Weights of all sources, in the order of the spec, each from a step on."""


class Layout:
    """Known once every shard is indexed and `lay_out` was called."""

    def __init__(self, spec: JobSpec, manifest: CountedShards, changes: Changes) -> None:
        self.num_steps = 0
        """0 until it is known."""
        self._spec = spec
        self._manifest = manifest
        self.changes = changes
        """Of the mixture. To be followed by `lay_out`."""

    def lay_out(self) -> None:
        """Find out where each sample stands. Takes a moment where there are many shards.

        Raises JobFailedError where a source has no usable sample.
        """
        size = self._spec.global_batch
        self._order = self._manifest.order([(step * size, weights) for step, weights in self.changes])
        self._num_samples = self._limit()
        self.num_steps = -(-self._num_samples // size)

    def _limit(self) -> int:
        """Samples of all epochs, or of all steps where that is less."""
        limits = []
        if self._spec.steps is not None:
            limits.append(self._spec.steps * self._spec.global_batch)
        if self._spec.epochs is not None or self._spec.steps is None:
            limits.append(self._order.num_samples(self._spec.epochs or 1))
        return min(limits)

    def refs(self, step: int) -> list[SampleRef]:
        """The samples of a step, by place."""
        size = self._spec.global_batch
        return self._order.refs(step * size, min((step + 1) * size, self._num_samples))

    def changed(self, step: int, weights: Mapping[str, float]) -> Changes:
        """The changes with other weights from `step` on; those for later steps are dropped.

        Raises UserError where the weights are not of every source, or are none.
        """
        names = [source.name for source in self._spec.sources]
        if sorted(weights) != sorted(names):
            raise UserError(f"weights must name every source once: {', '.join(names)}; got {', '.join(weights) or 'none'}")
        changes = (*(change for change in self.changes if change[0] < step), (step, tuple(weights[name] for name in names)))
        try:
            Mixture([1.0] * len(names), changes)
        except ValueError as err:
            raise UserError(str(err)) from err
        return changes

    def share(self, source: int, step: int) -> float:
        """Of a source, by its number in the spec, in the samples of a step."""
        weights = [weights for first, weights in self.changes if first <= step]
        if not weights:
            weights = [tuple(spec.weight or self._manifest.num_samples(k) for k, spec in enumerate(self._spec.sources))]
        return weights[-1][source] / (sum(weights[-1]) or 1.0)
