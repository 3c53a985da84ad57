"""Records of committed steps, and the sums over them: a job's progress, and whether it has too many bad samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from headrace.source_spec import SourceSpec

MIN_JUDGED = 100  # samples of a source before its share of bad ones is judged


class Amounts(NamedTuple):
    """What a source has contributed to committed steps. A release may append fields, each with a default, and remove none."""

    samples: int = 0
    tokens: int = 0
    image_patches: int = 0
    mel_frames: int = 0
    refused: int = 0
    """Samples that were skipped or substituted. `samples` does not count these, but it counts their substitutes."""
    truncated: int = 0
    """Samples that were too long and have been cut."""
    filtered: int = 0
    """Samples that the source's filter does not admit for their sizes; `refused` does not count them."""


Delivered = Mapping[str, Amounts]
"""Name of a source -> what it has contributed."""


def known_fields(kind: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the fields of a stored JSON document that dataclass `kind` has: a newer release may have written others."""
    return {item.name: fields[item.name] for item in dataclasses.fields(kind) if item.name in fields}


def _stored_delivered(document: Mapping[str, Sequence[int]]) -> Delivered:
    return {source: Amounts(*amounts[: len(Amounts._fields)]) for source, amounts in document.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The record of a committed step. `samples`: names, sorted; times in seconds, of the slowest rank."""

    samples: tuple[str, ...]
    substitutes: tuple[str, ...] = ()
    """Names of samples consumed in addition, at the places of refused ones (`SourceSpec.on_bad`), sorted."""
    loss: float
    step_s: float
    data_wait_s: float
    delivered: Delivered = field(default_factory=dict)

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> StepRecord:
        """Return the record in an entry of the store's ledger, without fields that this release does not know."""
        fields = known_fields(cls, document)
        samples, substitutes = (tuple(document.get(name, ())) for name in ("samples", "substitutes"))
        return cls(
            **{**fields, "samples": samples, "substitutes": substitutes, "delivered": _stored_delivered(document["delivered"])}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Sums over the committed steps. Losses are NaN until a step reports one; times in seconds."""

    samples: int = 0
    first_loss: float = math.nan
    last_loss: float = math.nan
    step_s: float = 0.0
    data_wait_s: float = 0.0
    delivered: Delivered = field(default_factory=dict)

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Progress:
        """Return the sums in an entry of the store's ledger, without fields that this release does not know."""
        return cls(**{**known_fields(cls, document), "delivered": _stored_delivered(document["delivered"])})

    def judged(self, sources: Sequence[SourceSpec]) -> str:
        """Return a sentence that says why the bad samples of a source stop the job; empty if they do not."""
        sentences = (beyond_limit(source, self.delivered.get(source.name, Amounts())) for source in sources)
        return next(filter(None, sentences), "")

    def after(self, record: StepRecord) -> Progress:
        """Return the progress after one more step."""
        sums = replace(
            self,
            samples=self.samples + len(record.samples),
            step_s=self.step_s + record.step_s,
            data_wait_s=self.data_wait_s + record.data_wait_s,
            delivered=added(self.delivered, record.delivered),
        )
        if math.isnan(record.loss):
            return sums
        first = record.loss if math.isnan(self.first_loss) else self.first_loss
        return replace(sums, first_loss=first, last_loss=record.loss)


def added(one: Delivered, other: Delivered) -> Delivered:
    """Return the sums of both, source by source."""
    zero = Amounts()
    return {name: Amounts(*map(sum, zip(one.get(name, zero), other.get(name, zero), strict=True))) for name in {**one, **other}}


def beyond_limit(source: SourceSpec, amounts: Amounts) -> str:
    """Return a sentence that says why a source's bad samples stop the job (`SourceSpec.max_bad`, `max_bad_share`); else empty."""
    refused, all_samples = amounts.refused, amounts.samples + amounts.refused
    remedy = "`headrace job quarantine` names them; mend them, or raise the limit in a new job"
    if source.max_bad is not None and refused > source.max_bad:
        return f"{refused} samples of source {source.name!r} were refused, more than its max_bad of {source.max_bad}: {remedy}"
    share = refused / max(1, all_samples)
    if source.max_bad_share is not None and all_samples >= MIN_JUDGED and share > source.max_bad_share:
        limit = f"its max_bad_share of {source.max_bad_share:g}"
        return f"{refused} of {all_samples} samples of source {source.name!r} were refused, more than {limit}: {remedy}"
    return ""
