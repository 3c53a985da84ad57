"""Measurement of every sample of a data set, from headers and text alone."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headrace.preprocessor import audio, image
from headrace.preprocessor.decoding import probe_of
from headrace.preprocessor.job_work import JobWork
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.record_to_sample import Text
from headrace.quarantine import Rejected
from headrace.sample import Probe, SampleRef
from headrace.spec import JobSpec, SourceSpec

Values = NDArray[np.int64] | NDArray[np.float64]

COLUMNS = ("image_side_px", "image_tokens", "audio_s", "text_tokens", "tokens", "target_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSample(Probe):
    """A sample's probe, with further facts that planning has no use for."""

    has_text: bool
    image_sides_px: tuple[int, ...]
    """Longer side of each image as stored, before it is scaled to the patch grid."""


class MeasuringJob(JobWork):
    """A job that only probes samples and decodes none."""

    def __init__(self, spec: JobSpec) -> None:
        """Make the sample processor. Raises SpecError where its tokenizer cannot be read."""
        super().__init__(spec.name, spec)
        _ = self.processor  # made now, so that a tokenizer that does not fit is found before the data is read

    def measure(self, refs: Sequence[SampleRef]) -> tuple[list[MeasuredSample], list[Rejected]]:
        """Probe samples; return the good ones and the rejected ones, each in the order of `refs`."""
        results = [self._attempt(ref, partial(self._measured, ref)) for ref in refs]
        good = [result for result in results if isinstance(result, MeasuredSample)]
        return good, [result for result in results if isinstance(result, Rejected)]

    def _measured(self, ref: SampleRef, record: Record, source: SourceSpec) -> MeasuredSample:
        """Probe one sample from its record. Raises BadSampleError where the sample is rejected."""
        loaded = self.processor.load(record, source)
        probe = probe_of(self.sample_name(ref), self.processor.size(loaded))
        return MeasuredSample(
            name=probe.name,
            num_tokens=probe.num_tokens,
            num_targets=probe.num_targets,
            image_patches=probe.image_patches,
            mel_frames=probe.mel_frames,
            has_text=any(isinstance(segment, Text) and segment.text.strip() for segment in loaded.sample.segments),
            image_sides_px=tuple(max(image.read_size(data, self.spec.image)) for data in loaded.images),
        )


class Tally:
    """Totals and columns of values over the samples of a survey, at eight bytes for each value."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._columns = {name: array("q") for name in COLUMNS}  # audio_s in mel frames
        self.samples = 0
        self.recordings = 0
        self.combinations: Counter[str] = Counter()
        """Number of samples by the modalities they have, such as `text+image`."""

    def add(self, sample: MeasuredSample) -> None:
        """Count one good sample."""
        image_tokens = sum(patches // self._spec.image.merge**2 for patches in sample.image_patches)
        audio_tokens = sum(audio.num_tokens(frames, self._spec.audio) for frames in sample.mel_frames)
        has = {"text": sample.has_text, "image": bool(sample.image_patches), "audio": bool(sample.mel_frames)}
        self.samples += 1
        self.recordings += len(sample.mel_frames)
        self.combinations["+".join(name for name, there in has.items() if there)] += 1
        self._columns["image_side_px"].extend(sample.image_sides_px)
        if has["image"]:
            self._columns["image_tokens"].append(image_tokens)
        if has["audio"]:
            self._columns["audio_s"].append(sum(sample.mel_frames))
        self._columns["text_tokens"].append(sample.num_tokens - image_tokens - audio_tokens)
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
