"""What Headrace makes of a stored layout, measured by what the layout's own reader makes of it.

It is read as a preprocessor reads: listed, opened, probed from the headers, decoded. No sample counts that is not decoded.
"""

from __future__ import annotations

import posixpath
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.preprocessor.decoding import SampleProcessor
from headrace.preprocessor.records.record_to_sample import Image, Role, Sample, Segment, Text
from headrace.preprocessor.sources import list_shards, open_shard
from headrace.preprocessor.sources.metadataset import expand
from headrace.quarantine import BadSampleError
from headrace.spec import JobSpec, parse_spec
from tests.layouts.layout import Layout
from tests.layouts.plain import Turn, as_lines, digests, joined

_SHARE = "share"
_MAX_TOKENS = 100_000


class Outcome(StrEnum):
    """What became of a layout."""

    RIGHT = "right"
    REFUSED = "refused"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a layout, and why."""

    outcome: Outcome
    reason: str = ""
    """Of a refusal: the reason of quarantine, or "data set" where the source as a whole is refused."""
    detail: str = ""
    """The sentence that says so; of a wrong layout, what is wrong."""


def judge(layout: Layout, folder: Path, expected: Sequence[Any], mapping: Mapping[str, Any]) -> Verdict:
    """Read the layout in `folder` with a mapping, and compare its samples with the expected ones."""
    delivered: list[Any] = []
    refused: list[BadSampleError] = []
    try:
        spec = _job(layout, folder, mapping)
        for sample in samples_of(spec):
            if isinstance(sample, BadSampleError):
                refused.append(sample)
            else:
                delivered.append(plain_of(sample, expected))
        if _SHARE in [
            sample[0] for sample in expected
        ]:  # of a mixture its sources and their shares count, not how often it repeats
            delivered = [*{str(sample): sample for sample in delivered}.values(), *_shares(spec)]
    except UserError as err:
        return Verdict(outcome=Outcome.REFUSED, reason="data set", detail=_without_folder(str(err), folder))
    ours, theirs = Counter(as_lines(delivered)), Counter(as_lines(expected))
    if ours - theirs:
        return Verdict(
            outcome=Outcome.WRONG, detail=f"not of its reader: {min(ours - theirs)}; missing: {sorted(theirs - ours)[:1]}"
        )
    if ours == theirs:
        return Verdict(outcome=Outcome.RIGHT)
    if not refused:
        return Verdict(outcome=Outcome.WRONG, detail=f"missing, and nothing refused: {min(theirs - ours)}")
    return Verdict(outcome=Outcome.REFUSED, reason=refused[0].reason.value, detail=_without_folder(refused[0].detail, folder))


def _shares(spec: JobSpec) -> list[Any]:
    """Return each data set's share of a mixture, as pseudo-samples: no reading of single sources gives them."""
    parts: dict[str, float] = defaultdict(float)
    for source in spec.sources:
        parts[posixpath.basename(source.path.partition("#")[0])] += source.weight or source.repetitions or 1.0
    return [[_SHARE, name, round(value / sum(parts.values()), 6)] for name, value in parts.items()]


def _job(layout: Layout, folder: Path, mapping: Mapping[str, Any]) -> JobSpec:
    path = f"{folder}{layout.path}" if layout.path.startswith("#") else posixpath.join(folder, layout.path).rstrip("/")
    spec = {"name": "layout", "sources": [{"path": path, "mapping": dict(mapping)}], "text": {"max_tokens": _MAX_TOKENS}}
    return expand(parse_spec(spec))


def samples_of(spec: JobSpec) -> Iterator[Sample | BadSampleError]:
    """Yield the samples of a job's shards in their order, decoded, and of each that is refused the reason."""
    processor = SampleProcessor(spec)
    for info in list_shards(spec):
        source = spec.sources[info.source]
        with open_shard(info.url, source) as shard:
            yield from (BadSampleError(item.reason, item.detail) for item in shard.rejected)
            for row in range(shard.num_rows):
                try:
                    record = shard.read(row)
                    loaded = processor.load(record, source)
                    processor.decode(record, source)
                    yield loaded.sample
                except BadSampleError as err:
                    yield err


def plain_of(sample: Sample, expected: Sequence[Any]) -> list[Turn]:
    """Return a sample in the plain form, with the digests that `expected` has of its media."""
    known = set(_digests_in(expected))
    turns: list[Turn] = []
    for turn in sample.turns:
        parts = joined(_part(segment, known) for segment in turn.segments)
        turns.append([turn.role.value, parts, *([False] if turn.role is Role.ASSISTANT and not turn.learnt else [])])
    return turns


def _part(segment: Segment, known: set[str]) -> Any:
    if isinstance(segment, Text):
        return segment.text
    kind = "image" if isinstance(segment, Image) else "audio"
    found = digests(segment.data)
    return {kind: min(found & known or found)}


def _digests_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        for item in value:
            yield from _digests_in(item)


def _without_folder(text: str, folder: Path) -> str:
    return " ".join(text.replace(str(folder), "PATH").split())
