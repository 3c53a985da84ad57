"""From records to payload: size a sample, decode its media, and put decoded samples into an Arrow batch.

    record --mapping--> sample --headers--> counts --template--> input_ids, labels
             (read)                 |
                                    +--media--> patches, mel

Reading ends at the sample: from there on everything is in memory. Probing stops at the counts, and decoding begins with
them: so they agree, and pixels and sound go straight to their place in an array of the caller's that holds many samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.preprocessor import audio, image
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.record_to_sample import Audio, Image, Sample, Text, to_sample
from headrace.preprocessor.text.template import Sequence, load_template
from headrace.quarantine import Rejected
from headrace.sample import SCHEMA, Probe, SampleRef
from headrace.spec import JobSpec, SourceSpec

Room = tuple[NDArray[np.uint8], NDArray[np.float16]]
"""For the patches, (P, 3 * patch * patch), and the mel frames, (F, mel_bins), of some samples together."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A record in memory with its media, of which nothing is decoded."""

    sample: Sample

    @property
    def images(self) -> tuple[bytes, ...]:
        """Files, in the order of the sample."""
        return tuple(segment.data for segment in self.sample.segments if isinstance(segment, Image))

    @property
    def recordings(self) -> tuple[bytes, ...]:
        """Files, in the order of the sample."""
        return tuple(segment.data for segment in self.sample.segments if isinstance(segment, Audio))

    @property
    def nbytes(self) -> int:
        """Bytes of the media, and characters of the text."""
        return sum(len(item.text) if isinstance(item, Text) else len(item.data) for item in self.sample.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPart:
    """The samples of a part in memory, none of them decoded."""

    samples: Mapping[SampleRef, Loaded | Rejected]
    """In the order of the plan."""

    @property
    def nbytes(self) -> int:
        """Bytes of the media and of the text."""
        return sum(loaded.nbytes for loaded in self.samples.values() if isinstance(loaded, Loaded))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What text and headers say of a sample: all of its payload but pixels and sound."""

    sequence: Sequence
    grids: tuple[image.Grid, ...]
    """Of the images."""
    mel_frames: tuple[int, ...]
    """Of the recordings."""

    @property
    def nbytes(self) -> int:
        """Bytes of the sequence."""
        return self.sequence.input_ids.nbytes + self.sequence.labels.nbytes

    @property
    def num_patches(self) -> int:
        """Of all images."""
        return sum(grid.patches for grid in self.grids)

    @property
    def num_frames(self) -> int:
        """Of all recordings."""
        return sum(self.mel_frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A sample in memory that knows its sizes."""

    loaded: Loaded
    sizes: Sizes


class Pipeline:
    """The preprocessing that a job's spec asks for. Has no state; thread-safe.

    Decoding from a thread pool: call `torch.set_num_threads(1)` at the start of the process.
    """

    def __init__(self, spec: JobSpec) -> None:
        """Raises SpecError: the tokenizer cannot be read or lacks a control token."""
        image.log_codecs()
        self._template = load_template(spec.text)
        self.vocabulary = self._template.vocabulary
        self._image = spec.image
        self._audio = spec.audio

    def load(self, record: Record, source: SourceSpec) -> Loaded:
        """Read a record's media. Raises BadSampleError."""
        return Loaded(sample=to_sample(record, source.mapping))

    def size(self, loaded: Loaded) -> Sizes:
        """Make a sample's tokens, and read the headers of its media. Raises BadSampleError."""
        grids = tuple(image.probe(data, self._image) for data in loaded.images)
        frames = tuple(audio.probe(data, self._audio) for data in loaded.recordings)
        return Sizes(sequence=self._render(loaded.sample, grids, frames), grids=grids, mel_frames=frames)

    def decode(self, record: Record, source: SourceSpec) -> Row:
        """A record with its media decoded, in arrays of its own. Raises BadSampleError."""
        loaded = self.load(record, source)
        sizes = self.size(loaded)
        return self.fill(Sized(loaded=loaded, sizes=sizes), *self.room([sizes]))

    def room(self, samples: SequenceOf[Sizes]) -> Room:
        """As much as all these samples need."""
        patches = sum(sizes.num_patches for sizes in samples)
        frames = sum(sizes.num_frames for sizes in samples)
        return np.empty((patches, 3 * self._image.patch**2), np.uint8), np.empty((frames, self._audio.mel_bins), np.float16)

    def fill(self, sized: Sized, patches: NDArray[np.uint8], mel: NDArray[np.float16]) -> Row:
        """Decode a sample's media into arrays with room for just this sample; the row holds these. Raises BadSampleError."""
        begin = 0
        for data, grid in zip(sized.loaded.images, sized.sizes.grids, strict=True):
            image.decode(data, self._image, patches[begin : begin + grid.patches])
            begin += grid.patches
        begin = 0
        for data, frames in zip(sized.loaded.recordings, sized.sizes.mel_frames, strict=True):
            mel[begin : begin + frames] = audio.decode(data, self._audio)
            begin += frames
        return self.row(sized.sizes, patches, mel)

    def row(self, sizes: Sizes, patches: NDArray[np.uint8], mel: NDArray[np.float16]) -> Row:
        """A sample with the arrays that its media are, or will be, in."""
        return Row(
            input_ids=sizes.sequence.input_ids,
            labels=sizes.sequence.labels,
            patches=patches,
            image_grids=np.array([(1, grid.height, grid.width) for grid in sizes.grids], np.int32).reshape(-1, 3),
            mel=mel,
            mel_frames=np.array(sizes.mel_frames, np.int32),
        )

    def encode(self, sample_ids: SequenceOf[int], rows: SequenceOf[Row], room: Room | None = None) -> pa.RecordBatch:
        """One batch with headrace.sample.SCHEMA.

        `room`: that the arrays of all rows are views of, in this order: patches and mel frames are not copied then.
        """
        patches, mel = ([row.patches for row in rows], [row.mel for row in rows]) if room is None else ([room[0]], [room[1]])
        grids = _values([row.image_grids for row in rows], pa.int32())
        columns = [
            pa.array(sample_ids, pa.int64()),
            _lists([row.input_ids for row in rows], pa.int32()),
            _lists([row.labels for row in rows], pa.int32()),
            _large_lists([row.patches.size for row in rows], patches, pa.uint8()),
            pa.ListArray.from_arrays(
                _offsets([len(row.image_grids) for row in rows], np.int32), pa.FixedSizeListArray.from_arrays(grids, 3)
            ),
            _large_lists([row.mel.size for row in rows], mel, pa.float16()),
            _lists([row.mel_frames for row in rows], pa.int32()),
            pa.array([row.flags for row in rows], pa.int32()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def _render(self, sample: Sample, grids: SequenceOf[image.Grid], frames: SequenceOf[int]) -> Sequence:
        image_tokens = (grid.tokens(self._image.merge) for grid in grids)
        audio_tokens = (audio.num_tokens(count, self._audio) for count in frames)
        order = [segment for segment in sample.segments if isinstance(segment, Image | Audio)]
        return self._template.render(
            sample, [next(image_tokens if isinstance(segment, Image) else audio_tokens) for segment in order]
        )


def probe_of(name: str, sizes: Sizes) -> Probe:
    """What the reorder service is told of a sample."""
    return Probe(
        name=name,
        num_tokens=len(sizes.sequence.input_ids),
        num_targets=sizes.sequence.num_targets,
        image_patches=tuple(grid.patches for grid in sizes.grids),
        mel_frames=sizes.mel_frames,
    )


def _lists(arrays: list[NDArray[np.int32]], kind: pa.DataType) -> pa.ListArray:
    return pa.ListArray.from_arrays(_offsets([array.size for array in arrays], np.int32), _values(arrays, kind))


def _large_lists(
    sizes: list[int], arrays: list[NDArray[np.uint8]] | list[NDArray[np.float16]], kind: pa.DataType
) -> pa.LargeListArray:
    return pa.LargeListArray.from_arrays(_offsets(sizes, np.int64), _values(arrays, kind))


def _offsets(sizes: list[int], dtype: type[np.int32] | type[np.int64]) -> pa.Array:
    offsets = np.zeros(len(sizes) + 1, dtype)
    np.cumsum(sizes, out=offsets[1:])
    return pa.array(offsets)


def _values(arrays: SequenceOf[NDArray[np.generic]], kind: pa.DataType) -> pa.Array:
    flat = [array.reshape(-1) for array in arrays if array.size]
    return pa.array((flat[0] if len(flat) == 1 else np.concatenate(flat)) if flat else [], kind)
