"""Measurement of every sample of a data set, from headers and text alone."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.anyres import image_of_sample
from headrace.cli.costs.remote_beginnings import Beginnings
from headrace.cli.costs.sample_choice import Choice, choose_beginnings, choose_evenly
from headrace.cli.progress_bar import ProgressBar
from headrace.preprocessor import image
from headrace.preprocessor.decoding import probe_of
from headrace.preprocessor.job_work import JobWork
from headrace.preprocessor.records.field_use import FieldUse, field_uses, kind_of
from headrace.preprocessor.records.names_used import names_used
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.record_to_sample import Text
from headrace.preprocessor.sources import list_shards
from headrace.preprocessor.sources.blob import is_remote
from headrace.quarantine import Reason, Rejected
from headrace.sample import Probe, SampleRef
from headrace.source_spec import SourceSpec
from headrace.spec import JobSpec

MOST_LAYOUTS = 1000  # of records whose uses are remembered
CHUNK_SAMPLES = 16  # per task of the thread pool: less than a tenth of a second on local disks

Values = NDArray[np.int64] | NDArray[np.float64]

COLUMNS = ("image_side_px", "image_tokens", "audio_s", "text_tokens", "tokens", "target_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSample(Probe):
    """A sample's probe, with further facts that planning has no use for."""

    has_text: bool
    image_tokens: int
    """Number of LLM tokens of its images."""
    image_sides_px: tuple[int, ...]
    """Longer side of each image as stored, before it is scaled to the patch grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was found at one place of the data set."""

    source: int
    """Index into the job's sources."""
    result: MeasuredSample | Rejected
    fields: tuple[FieldUse, ...] = ()
    """The fields and members of the sample's record; none where it cannot be read."""
    named: frozenset[str] = frozenset()
    """Which names of its source's mapping the record has."""


class MeasuringJob(JobWork):
    """A job that only probes samples and decodes none."""

    def __init__(self, spec: JobSpec, limit: int | None) -> None:
        """Make the sample processor, and list the shards.

        Raises SpecError where the tokenizer cannot be read, DatasetError where the shards cannot be listed.
        """
        super().__init__(spec.name, spec)
        self._uses: dict[object, tuple[FieldUse, ...]] = {}
        _ = self.processor  # made now, so that a tokenizer that does not fit is found before the data is read
        self.shards = tuple(list_shards(spec))
        few = limit is not None and any(is_remote(shard.url) for shard in self.shards)
        self.beginnings = Beginnings() if few else None
        """What remote shards are read through where only some of their samples are looked at."""
        self._cache = self.beginnings

    def look(self, refs: Sequence[SampleRef]) -> list[Look]:
        """Probe samples, in their order."""
        return [self._look(ref) for ref in refs]

    def rows_of_beginning(self, shard: int, wanted: int) -> tuple[int, list[Rejected]]:
        """Return how many samples of a shard can be read, at least `wanted` if it has as many, and the damage among these.

        Raises DatasetError where the shard cannot be read.
        """
        info = self.shards[shard]
        while True:
            rows, damage = self.index(shard)
            if self.beginnings is None or not self.beginnings.is_cut(info.url):
                return rows, damage
            cut = [item for item in damage if item.reason is Reason.ARCHIVE_TRUNCATED]
            if rows and all(item.name == info.name for item in cut):
                rows -= 1  # no sample is said to be cut, so the last one may be, between two members
            if rows >= wanted:
                return rows, [item for item in damage if item not in cut]
            self.beginnings.lengthen(info.url, rows, wanted)
            self._open_shards.slot(self, shard, self._wanted_shards).shard = None

    def _look(self, ref: SampleRef) -> Look:
        source = self.shards[ref.shard].source
        mapping = self.spec.sources[source].mapping
        records: list[Record] = []

        def measure(record: Record, source: SourceSpec) -> MeasuredSample:
            records.append(record)
            return self._measured(ref, record, source)

        result = self._attempt(ref, measure)
        if not records:
            return Look(source=source, result=result)
        [record] = records
        reason = result.reason if isinstance(result, Rejected) else None
        alike = (
            source,
            reason,
            record.members,
            tuple((name, kind_of(value), bool(value)) for name, value in record.fields.items()),
        )
        fields = self._uses.get(alike)  # to find it out takes long
        if fields is None:
            fields = field_uses(record, mapping)
            if len(self._uses) < MOST_LAYOUTS:
                self._uses[alike] = fields
        return Look(source=source, result=result, fields=fields, named=names_used(record, mapping))

    def _measured(self, ref: SampleRef, record: Record, source: SourceSpec) -> MeasuredSample:
        """Probe one sample from its record. Raises BadSampleError where the sample is rejected."""
        loaded = self.processor.load(record, source)
        sizes, spec = self.processor.size(loaded), image_of_sample(self.spec.image, len(loaded.images))
        probe = probe_of(self.sample_name(ref), sizes)
        return MeasuredSample(
            name=probe.name,
            num_tokens=probe.num_tokens,
            num_targets=probe.num_targets,
            image_patches=probe.image_patches,
            mel_frames=probe.mel_frames,
            is_truncated=probe.is_truncated,
            has_text=any(isinstance(segment, Text) and segment.text.strip() for segment in loaded.sample.segments),
            image_tokens=sum(grid.tokens(spec.merge) for grid in sizes.grids),
            image_sides_px=tuple(max(image.read_size(data, spec)) for data in loaded.images),
        )


def survey(job: MeasuringJob, limit: int | None, take: Callable[[Look], object]) -> Choice:
    """Choose at most `limit` samples, probe them, and pass what was found to `take`, in order. Returns what was looked at.

    Raises DatasetError where a shard cannot be read.
    """
    with ProgressBar() as bar:
        choice = _choose(job, limit, bar)
        bar.begin("probing samples", len(choice.shards))
        for looks in _look_at_all(job, choice):
            for look in looks:
                take(look)
            bar.advance(len(looks))
    return choice


def _choose(job: MeasuringJob, limit: int | None, bar: ProgressBar) -> Choice:
    if limit is not None and job.beginnings is not None:
        bar.begin("finding samples", limit)

        def count(shard: int, wanted: int) -> tuple[int, list[Rejected]]:
            rows, damage = job.rows_of_beginning(shard, wanted)
            bar.advance(min(rows, wanted))
            return rows, damage

        return choose_beginnings([job.shards[number].source for number in range(len(job.shards))], limit, count)
    bar.begin("indexing shards", len(job.shards))
    rows: list[int] = []
    damage: list[Rejected] = []
    for shard in range(len(job.shards)):
        num_rows, damaged = job.index(shard)
        rows.append(num_rows)
        damage += damaged
        bar.advance(1)
    return choose_evenly(rows, damage, limit)


def _look_at_all(job: MeasuringJob, choice: Choice) -> Iterator[list[Look]]:
    """Probe samples in threads; yield what was found in each chunk, in order."""
    pool = ThreadPoolExecutor()
    try:
        begins = range(0, len(choice.shards), CHUNK_SAMPLES)
        yield from pool.map(lambda begin: job.look(choice.refs(begin, begin + CHUNK_SAMPLES)), begins)
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt does not wait for the samples that are left


class Tally:
    """Totals and columns of values over the samples of a survey, at eight bytes for each value."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._columns = {name: array("q") for name in COLUMNS}  # audio_s in mel frames
        self.samples = 0
        self.recordings = 0
        self.truncated = 0
        """Number of samples that were too long and have been cut."""
        self.combinations: Counter[str] = Counter()
        """Number of samples by the modalities they have, such as `text+image`."""

    def add(self, sample: MeasuredSample) -> None:
        """Count one good sample."""
        audio_tokens = sum(map(self._spec.audio.num_tokens, sample.mel_frames))
        has = {"text": sample.has_text, "image": bool(sample.image_patches), "audio": bool(sample.mel_frames)}
        self.samples += 1
        self.recordings += len(sample.mel_frames)
        self.truncated += sample.is_truncated
        self.combinations["+".join(name for name, there in has.items() if there)] += 1
        self._columns["image_side_px"].extend(sample.image_sides_px)
        if has["image"]:
            self._columns["image_tokens"].append(sample.image_tokens)
        if has["audio"]:
            self._columns["audio_s"].append(sum(sample.mel_frames))
        self._columns["text_tokens"].append(sample.num_tokens - sample.image_tokens - audio_tokens)
        self._columns["tokens"].append(sample.num_tokens)
        self._columns["target_tokens"].append(sample.num_targets)

    def modalities(self) -> dict[str, int]:
        """Return the number of samples that have text, images and audio, by modality."""
        return {
            name: sum(count for key, count in self.combinations.items() if name in key.split("+"))
            for name in ("text", "image", "audio")
        }

    def columns(self) -> dict[str, Values]:
        """Return the values of every quantity that some sample has, in the order of COLUMNS.

        Each is an array (n,) with a value for each sample that has the quantity, or for each image in image_side_px.
        """
        columns: dict[str, Values] = {name: np.array(values) for name, values in self._columns.items() if values}
        if "audio_s" in columns:
            columns["audio_s"] = np.array(self._columns["audio_s"], np.float64) * self._spec.audio.hop_s
        return columns
