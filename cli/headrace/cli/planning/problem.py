"""A global batch together with the pipelines that it is planned for: the input of the planning commands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.errors import UserError
from headrace.plan import StepPlan, Topology

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.cli.costs.cost_table import CostTable
    from headrace.reorder_service.planning.batch import Batch
    from headrace.reorder_service.planning.execution import Execution


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """A global batch of samples or packs, with the pipelines that it is planned for and the units of its figures."""

    samples: Batch
    """The global batch before packing."""
    batch: Batch
    """The batch to plan: of samples, or of the packs that they are in."""
    packs: NDArray[np.int64] | None
    """(n,) pack of each sample; None if samples are not packed."""
    pack_fill: float = 1.0
    """Share of the packs' length that samples fill; the rest is padding where packs are padded to one length."""
    time_unit: str = ""
    """Unit of the costs, like `s`; empty if unknown."""
    memory_unit: str = ""
    """Unit of the activations, like `bytes`; empty if unknown."""

    @classmethod
    def of(
        cls, table: CostTable, topology: Topology, execution: Execution, *, seed: int = 0, pack_tokens: int | None = None
    ) -> Problem:
        """Take the samples of a cost table as one global batch on the given pipelines.

        seed: for the strategies that search. pack_tokens: length of the sequences into which samples are packed first, if any.
        Raises UserError with the row and the rule that it breaks.
        """
        from headrace.reorder_service.planning.batch import make_batch
        from headrace.reorder_service.planning.packing import pack_batch

        memory_unit = table.memory_unit if table.memory else table.time_unit
        if pack_tokens is not None:
            _check_lengths(table, pack_tokens)
        try:
            samples = make_batch(
                table.sample_ids, table.costs, topology, seed,
                execution=execution, memory=table.memory, transfer_bytes=table.transfer_bytes,
            )  # fmt: skip
            if pack_tokens is None or table.tokens is None:
                return cls(samples=samples, batch=samples, packs=None, time_unit=table.time_unit, memory_unit=memory_unit)
            batch, packs = pack_batch(samples, table.tokens, pack_tokens, padded=True)
        except ValueError as err:
            raise UserError(f"{table.name}: {err}") from err
        fill = float(table.tokens.sum()) / (len(batch.sample_ids) * pack_tokens)
        return cls(samples=samples, batch=batch, packs=packs, pack_fill=fill, time_unit=table.time_unit, memory_unit=memory_unit)

    @property
    def size(self) -> str:
        """Size of the global batch in words, like `512 samples in 93 packs (97% full)`."""
        packs = "" if self.packs is None else f" in {count(len(self.batch.sample_ids), 'pack')} ({self.pack_fill:.0%} full)"
        return f"{count(len(self.samples.sample_ids), 'sample')}{packs}"

    @property
    def planned_noun(self) -> str:
        """Name of what is planned and counted in figures: `samples` or `packs`."""
        return "samples" if self.packs is None else "packs"

    @property
    def hint_on_empty_microbatches(self) -> str:
        """A hint for the user if there are fewer packs than microbatches to put them into; otherwise empty."""
        packs, places = len(self.batch.sample_ids), self.batch.num_slots
        if self.packs is None or packs >= places:
            return ""
        return (
            f"{count(packs, 'pack')} cannot fill {count(places, 'microbatch')}: some stay empty; give fewer --microbatches or "
            "--replicas, or a shorter --pack-tokens"
        )

    def memory_in_words(self, amount: float) -> str:
        """Return an amount of memory in words: like `1.25 GiB` if memory is known to be in bytes, otherwise only the number."""
        return f"{amount / 2**30:.3g} GiB" if self.memory_unit == "bytes" else f"{amount:.4g}"

    def with_topology(self, topology: Topology) -> Problem:
        """Return the same global batch, planned for other pipelines with the same units."""
        samples, batch = (replace(batch, topology=topology) for batch in (self.samples, self.batch))
        return replace(self, samples=samples, batch=batch)

    def of_samples(self, plan: StepPlan) -> StepPlan:
        """Turn a plan of `batch`, which may consist of packs, into a plan of the samples."""
        from headrace.reorder_service.planning.packing import plan_of_samples

        return plan if self.packs is None else plan_of_samples(plan, self.samples, self.packs)


def count(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural, like `1 pack`, `2 packs` or `3 microbatches`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def _check_lengths(table: CostTable, capacity: int) -> None:
    if table.tokens is None:
        raise UserError(f"--pack-tokens needs to know how long samples are: give {table.name} a column 'tokens'")
    if capacity < 1:
        raise UserError(f"--pack-tokens must be at least 1, got {capacity}")
    wrong = ((table.tokens < 1) | (table.tokens > capacity)).nonzero()[0]
    if wrong.size:
        sample, length = table.sample_ids[wrong[0]], table.tokens[wrong[0]]
        raise UserError(f"{table.name}: sample {sample} has {length} tokens, but --pack-tokens {capacity} packs 1 to {capacity}")
