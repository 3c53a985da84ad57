"""The probes of a data set that a command plans with, and what it tells its user of those it could not take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import DatasetError

if TYPE_CHECKING:
    from headrace.sample import Probe
    from headrace.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedData:
    """At least one sample of a data set, as probed."""

    probes: Sequence[Probe]
    spec: JobSpec
    """The job that reads them, with blends expanded."""
    vocab: int
    """Size of its tokenizer's vocabulary."""
    num_samples: int
    """Samples in the data set, as far as they are known."""
    note: str
    """What was read, in words."""


def probe_data(spec: JobSpec, limit: int, *, shown: str, told: str, check: Callable[[int], object] = int) -> ProbedData:
    """Probe at most `limit` samples of what a job reads.

    shown, told: the data set as titles show it, and as `headrace inspect` is told. check: called with the size of the vocabulary
    before the data is read, for errors that should not wait for it. Raises UserError, SpecError and DatasetError, also where no
    sample is good.
    """
    from headrace.cli.costs.survey import Look, MeasuringJob, survey
    from headrace.quarantine import Rejected

    job = MeasuringJob(spec, limit)
    probes: list[Probe] = []
    refused: list[Rejected] = []

    def take(look: Look) -> None:
        if isinstance(look.result, Rejected):
            refused.append(look.result)
        else:
            probes.append(look.result)

    try:
        vocab = job.processor.vocabulary.size
        check(vocab)
        choice = survey(job, limit, take)
    finally:
        job.close()
    if not probes:
        raise DatasetError(f"{shown} holds no good sample; `headrace inspect {told}` says what is wrong")
    refusals = len(choice.damage) + len(refused)
    notes = [f"{refusals:,} refused"] * bool(refusals)
    if choice.num_left is None:
        shards = f"{choice.num_shards:,} of {len(job.shards):,} shard{'s' * (len(job.shards) != 1)}"
        notes.append(f"of {shards} (--limit)")
    elif choice.num_left:
        notes.append(f"{choice.num_left:,} not looked at (--limit)")
    return ProbedData(
        probes=probes,
        spec=job.spec,
        vocab=vocab,
        num_samples=len(probes) + refusals + (choice.num_left or 0),
        note=", ".join([f"read {len(probes):,} sample{'s' * (len(probes) != 1)}", *notes]),
    )
