"""From records to payload: probe a sample, decode it, and put decoded samples into an Arrow batch.

    record --mapping--> sample --image, audio--> counts --template--> input_ids, labels
                                     |
                                     +---------> patches, mel

Probe and decode take the same path but for the pixels and the sound, so that their counts agree.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.sample import SCHEMA, Probe
from headrace.spec import JobSpec, SourceSpec
from preprocessor import audio, image
from preprocessor.mapping import Audio, Image, Sample, to_sample
from preprocessor.record import Record
from preprocessor.template import Sequence, load_template

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A decoded sample. T: tokens; P: patches of all images; n: images; F: mel frames of all recordings; m: recordings."""

    input_ids: NDArray[np.int32]
    """(T,)"""
    labels: NDArray[np.int32]
    """(T,), LABEL_IGNORED where there is no loss"""
    patches: NDArray[np.uint8]
    """(P, 3 * patch * patch)"""
    image_grids: NDArray[np.int32]
    """(n, 3): (t, h, w) in patches; t is 1"""
    mel: NDArray[np.float16]
    """(F, mel_bins)"""
    mel_frames: NDArray[np.int32]
    """(m,), sums to F"""
    flags: int = 0
    """No bit has a meaning yet."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.input_ids, self.labels, self.patches, self.image_grids, self.mel, self.mel_frames)
        return sum(array.nbytes for array in arrays)


class Pipeline:
    """The preprocessing that a job's spec asks for. Has no state; thread-safe.

    Decoding from a thread pool: call `torch.set_num_threads(1)` at the start of the process.
    """

    def __init__(self, spec: JobSpec) -> None:
        """Raises SpecError: the tokenizer cannot be read or lacks a control token."""
        self._template = load_template(spec.text)
        self.vocabulary = self._template.vocabulary
        self._image = spec.image
        self._audio = spec.audio

    def probe(self, record: Record, source: SourceSpec) -> Probe:
        """What a record costs, from headers and text; named by its key. Raises BadSampleError."""
        sample = to_sample(record, source.mapping)
        grids = [image.probe(segment.data, self._image) for segment in sample.segments if isinstance(segment, Image)]
        frames = [audio.probe(segment.data, self._audio) for segment in sample.segments if isinstance(segment, Audio)]
        sequence = self._render(sample, grids, frames)
        return Probe(
            name=record.key,
            num_tokens=len(sequence.input_ids),
            num_targets=sequence.num_targets,
            image_patches=tuple(grid.patches for grid in grids),
            mel_frames=tuple(frames),
        )

    def decode(self, record: Record, source: SourceSpec) -> Row:
        """A record with its media decoded. Raises BadSampleError."""
        sample = to_sample(record, source.mapping)
        images = [image.decode(segment.data, self._image) for segment in sample.segments if isinstance(segment, Image)]
        mels = [audio.decode(segment.data, self._audio) for segment in sample.segments if isinstance(segment, Audio)]
        sequence = self._render(sample, [grid for _, grid in images], [len(mel) for mel in mels])
        return Row(
            input_ids=sequence.input_ids,
            labels=sequence.labels,
            patches=_joined([patches for patches, _ in images], (0, 3 * self._image.patch**2), np.uint8),
            image_grids=np.array([(1, grid.height, grid.width) for _, grid in images], np.int32).reshape(-1, 3),
            mel=_joined(mels, (0, self._audio.mel_bins), np.float16),
            mel_frames=np.array([len(mel) for mel in mels], np.int32),
        )

    def encode(self, sample_ids: SequenceOf[int], rows: SequenceOf[Row]) -> pa.RecordBatch:
        """One batch with headrace.sample.SCHEMA. Values are copied once into place, and not at all for a single row."""
        grids = _values([row.image_grids for row in rows], pa.int32())
        columns = [
            pa.array(sample_ids, pa.int64()),
            _lists([row.input_ids for row in rows], pa.int32()),
            _lists([row.labels for row in rows], pa.int32()),
            _large_lists([row.patches for row in rows], pa.uint8()),
            pa.ListArray.from_arrays(
                _offsets([len(row.image_grids) for row in rows], np.int32), pa.FixedSizeListArray.from_arrays(grids, 3)
            ),
            _large_lists([row.mel for row in rows], pa.float16()),
            _lists([row.mel_frames for row in rows], pa.int32()),
            pa.array([row.flags for row in rows], pa.int32()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def _render(self, sample: Sample, grids: list[image.Grid], frames: list[int]) -> Sequence:
        image_tokens = (grid.tokens(self._image.merge) for grid in grids)
        audio_tokens = (audio.num_tokens(count, self._audio) for count in frames)
        order = [segment for segment in sample.segments if isinstance(segment, Image | Audio)]
        return self._template.render(
            sample, [next(image_tokens if isinstance(segment, Image) else audio_tokens) for segment in order]
        )


def _joined(arrays: list[NDArray[_T]], empty: tuple[int, int], dtype: type[_T]) -> NDArray[_T]:
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0] if arrays else np.empty(empty, dtype)


def _lists(arrays: list[NDArray[np.int32]], kind: pa.DataType) -> pa.ListArray:
    return pa.ListArray.from_arrays(_offsets([array.size for array in arrays], np.int32), _values(arrays, kind))


def _large_lists(arrays: list[NDArray[np.uint8]] | list[NDArray[np.float16]], kind: pa.DataType) -> pa.LargeListArray:
    return pa.LargeListArray.from_arrays(_offsets([array.size for array in arrays], np.int64), _values(arrays, kind))


def _offsets(sizes: list[int], dtype: type[np.int32] | type[np.int64]) -> pa.Array:
    offsets = np.zeros(len(sizes) + 1, dtype)
    np.cumsum(sizes, out=offsets[1:])
    return pa.array(offsets)


def _values(arrays: SequenceOf[NDArray[np.generic]], kind: pa.DataType) -> pa.Array:
    flat = [array.reshape(-1) for array in arrays]
    return pa.array(flat[0] if len(flat) == 1 else np.concatenate(flat) if flat else [], kind)
