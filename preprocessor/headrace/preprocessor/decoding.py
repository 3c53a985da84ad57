"""From records to payload: size a sample, decode its media, and put decoded samples into an Arrow batch.

    record --mapping--> sample --headers--> counts --template--> input_ids, labels
             (read)                 |
                                    +--media--> patches, mel

Only the step from record to sample reads: after it, everything is in memory. Probing stops at the counts and decoding starts
from them, so the two agree, and media are decoded straight into their place in an array of the caller's that holds many samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.anyres import image_of_sample
from headrace.filter_spec import EVERYTHING, FilterSpec
from headrace.preprocessor import audio, image
from headrace.preprocessor.records import filtering
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.record_to_sample import Audio, Image, Sample, Text, to_sample
from headrace.preprocessor.text.media_markup import MediumTokens, TokenGrid
from headrace.preprocessor.text.sequence import TokenSequence
from headrace.preprocessor.text.template import load_template
from headrace.quarantine import AUDIO, IMAGE, BadSampleError, Reason, Rejected, blaming
from headrace.sample import Probe, SampleRef, payload_schema
from headrace.source_spec import SourceSpec
from headrace.spec import AudioSpec, JobSpec

MediaArrays = tuple[NDArray[np.uint8], NDArray[np.float16]]
"""Two arrays that several samples share: their patches, (P, 3 * patch * patch), and their mel frames, (F, mel_bins)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A decoded sample with T tokens, n images of P patches together, and m recordings of F mel frames together."""

    input_ids: NDArray[np.int32]
    """Token ids, shape (T,)."""
    labels: NDArray[np.int32]
    """Label of each token, not yet shifted, shape (T,); LABEL_IGNORED where there is no loss."""
    patches: NDArray[np.uint8]
    """Patches of all images in order, shape (P, 3 * patch * patch)."""
    image_grids: NDArray[np.int32]
    """Grid (t, h, w) of each image in patches, shape (n, 3); t is 1."""
    mel: NDArray[np.float16]
    """Log-mel features of all recordings in order, shape (F, mel_bins)."""
    mel_frames: NDArray[np.int32]
    """Number of mel frames of each recording, shape (m,); they sum to F."""
    flags: int = 0
    """Bits reserved for later use; none has a meaning yet."""
    image_sizes: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """With `image.fit: anyres`, else empty: size (height, width) in pixels of the image that begins with each grid, (0, 0) for
    its other tiles, shape (n, 2)."""
    target_weights: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """By how much the loss of each token counts, shape (T,), or empty: as in `TokenSequence`."""

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        sizes = (self.image_grids, self.mel_frames, self.image_sizes)
        return sum(array.nbytes for array in (self.input_ids, self.labels, self.target_weights, self.patches, self.mel, *sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSample:
    """A sample in memory with its media files, none of them decoded yet."""

    sample: Sample
    filter: FilterSpec = EVERYTHING
    """The filter of its source, which may leave it out for its sizes."""

    @property
    def images(self) -> tuple[bytes, ...]:
        """The image files, in the order of the sample."""
        return tuple(segment.data for segment in self.sample.segments if isinstance(segment, Image))

    @property
    def recordings(self) -> tuple[bytes, ...]:
        """The audio files, in the order of the sample."""
        return tuple(segment.data for segment in self.sample.segments if isinstance(segment, Audio))

    @property
    def nbytes(self) -> int:
        """Approximate size in memory: bytes of the media files plus characters of the text."""
        return sum(len(item.text) if isinstance(item, Text) else len(item.data) for item in self.sample.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPart:
    """The samples of a part, read into memory but not yet decoded."""

    samples: Mapping[SampleRef, LoadedSample | Rejected]
    """Each sample, or the rejection that stands in its place, in the order of the plan."""

    @property
    def nbytes(self) -> int:
        """Approximate size in memory: bytes of the media files plus characters of the text."""
        return sum(loaded.nbytes for loaded in self.samples.values() if isinstance(loaded, LoadedSample))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A sample's tokens and the sizes of its media, from text and headers alone: all of its payload except pixels and sound."""

    sequence: TokenSequence
    grids: tuple[image.Grid, ...]
    """Patch grid of each image of the sequence, those at `sequence.images`; its tiles are images of their own in the payload."""
    mel_frames: tuple[int, ...]
    """Number of mel frames of each recording of the sequence, or piece of one that is split: those at `sequence.recordings`."""
    recording_frames: tuple[int, ...]
    """Number of mel frames of each file, whether its pieces are in the sequence or not."""
    recordings: range
    """Which of the files have a piece in the sequence."""
    first_frame: int
    """Number of mel frames of the pieces that a cut has taken away in front."""

    @property
    def nbytes(self) -> int:
        """Size of the token sequence in bytes."""
        return self.sequence.input_ids.nbytes + self.sequence.labels.nbytes + self.sequence.target_weights.nbytes

    @property
    def num_patches(self) -> int:
        """Number of patches of all images together."""
        return sum(grid.patches for grid in self.grids)

    @property
    def num_frames(self) -> int:
        """Number of mel frames of all recordings together."""
        return sum(self.mel_frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedSample:
    """A sample in memory together with its sizes: all that decoding needs."""

    loaded: LoadedSample
    sizes: Sizes


class SampleProcessor:
    """The preprocessing that a job's spec asks for. Stateless and thread-safe.

    A process that decodes recordings from a thread pool should have torch use one thread (OMP_NUM_THREADS).
    """

    def __init__(self, spec: JobSpec) -> None:
        """Load the tokenizer that `spec` names. Raises SpecError if it cannot be read or lacks a control token."""
        image.log_codecs()
        self._template = load_template(spec.text)
        self.vocabulary = self._template.vocabulary
        self._image = spec.image
        self._schema = payload_schema(spec.image, spec.sources)
        self._audio = spec.audio
        self._min_targets = spec.text.min_targets

    def load(self, record: Record, source: SourceSpec) -> LoadedSample:
        """Read a record's media files into memory. Raises BadSampleError."""
        filtering.check_fields(record.fields, source.filter)
        sample = to_sample(record, source.mapping).with_recordings(lambda recording: cut_out(recording, self._audio))
        return LoadedSample(sample=sample, filter=source.filter)

    def size(self, loaded: LoadedSample) -> Sizes:
        """Tokenise a sample, and read the headers of its media. Raises BadSampleError."""
        spec = image_of_sample(self._image, len(loaded.images))
        grids = tuple(blaming(IMAGE, image.probe, data, spec) for data in loaded.images)
        frames = tuple(blaming(AUDIO, audio.probe, data, self._audio) for data in loaded.recordings)
        pieces = [audio.frames_of_pieces(count, self._audio) for count in frames]
        of_pieces = tuple(count for of_file in pieces for count in of_file)
        sequence = self._render(loaded.sample.with_pieces(list(map(len, pieces))), grids, of_pieces)
        if sequence.num_targets < self._min_targets:
            raise BadSampleError(Reason.TOO_SHORT, f"{sequence.num_targets} tokens to learn, fewer than {self._min_targets}")
        first, stop = sequence.recordings.start, sequence.recordings.stop
        file_of = [file for file, of_file in enumerate(pieces) for _ in of_file][first:stop]
        recordings = range(file_of[0], file_of[-1] + 1) if file_of else range(0)
        filtering.check_sizes(
            {
                "tokens": len(sequence.input_ids),
                "targets": sequence.num_targets,
                "images": len(sequence.images),
                "recordings": len(recordings),
            },
            loaded.filter,
        )
        return Sizes(
            sequence=sequence,
            grids=grids[sequence.images.start : sequence.images.stop],
            mel_frames=of_pieces[first:stop],
            recording_frames=frames,
            recordings=recordings,
            first_frame=sum(of_pieces[:first]),
        )

    def decode(self, record: Record, source: SourceSpec) -> Row:
        """Read a record and decode its media into newly allocated arrays. Raises BadSampleError."""
        loaded = self.load(record, source)
        sizes = self.size(loaded)
        return self.decode_into(SizedSample(loaded=loaded, sizes=sizes), *self.allocate([sizes]))

    def allocate(self, samples: Sequence[Sizes]) -> MediaArrays:
        """Allocate uninitialised arrays with room for the media of all these samples together."""
        patches = sum(sizes.num_patches for sizes in samples)
        frames = sum(sizes.num_frames for sizes in samples)
        return np.empty((patches, 3 * self._image.patch**2), np.uint8), np.empty((frames, self._audio.mel_bins), np.float16)

    def decode_into(self, sized: SizedSample, patches: NDArray[np.uint8], mel: NDArray[np.float16]) -> Row:
        """Decode a sample's media into arrays of exactly its size, which the returned row holds. Raises BadSampleError."""
        begin = 0
        images, files = sized.sizes.sequence.images, sized.loaded.images
        spec = image_of_sample(self._image, len(files))
        for data, grid in zip(files[images.start : images.stop], sized.sizes.grids, strict=True):
            blaming(IMAGE, image.decode, data, spec, patches[begin : begin + grid.patches])
            begin += grid.patches
        begin = -sized.sizes.first_frame
        for data, frames in zip(sized.loaded.recordings, sized.sizes.recording_frames, strict=True):
            if kept := range(max(0, begin), min(begin + frames, len(mel))):
                decoded = blaming(AUDIO, audio.decode, data, self._audio)
                mel[kept.start : kept.stop] = decoded[kept.start - begin : kept.stop - begin]
            begin += frames
        return self.row(sized.sizes, patches, mel)

    def row(self, sizes: Sizes, patches: NDArray[np.uint8], mel: NDArray[np.float16]) -> Row:
        """Return a sample's row with these arrays, into which its media have been or will be decoded."""
        return Row(
            input_ids=sizes.sequence.input_ids,
            labels=sizes.sequence.labels,
            patches=patches,
            image_grids=np.array(
                [(1, grid.height, grid.width) for grid in sizes.grids for _ in range(grid.tiles)], np.int32
            ).reshape(-1, 3),
            mel=mel,
            mel_frames=np.array(sizes.mel_frames, np.int32),
            image_sizes=np.array([size for grid in sizes.grids for size in _sizes_of_tiles(grid)], np.int32).reshape(-1, 2),
            target_weights=sizes.sequence.target_weights,
        )

    def encode(self, sample_ids: Sequence[int], rows: Sequence[Row], arrays: MediaArrays | None = None) -> pa.RecordBatch:
        """Encode rows as one Arrow batch with the job's columns of headrace.sample.SCHEMA.

        `arrays`: the two arrays of which the rows' patches and mel frames are consecutive views, in the order of `rows`. They
        are then not copied.
        """
        if arrays is None:
            patches, mel = [row.patches for row in rows], [row.mel for row in rows]
        else:
            patches, mel = [arrays[0]], [arrays[1]]
        columns = {
            "sample_id": pa.array(sample_ids, pa.int64()),
            "input_ids": _lists([row.input_ids for row in rows], pa.int32()),
            "labels": _lists([row.labels for row in rows], pa.int32()),
            "patches": _large_lists([row.patches.size for row in rows], patches, pa.uint8()),
            "image_grids": _tuples([row.image_grids for row in rows], 3),
            "mel": _large_lists([row.mel.size for row in rows], mel, pa.float16()),
            "mel_frames": _lists([row.mel_frames for row in rows], pa.int32()),
            "flags": pa.array([row.flags for row in rows], pa.int32()),
            "image_sizes": _tuples([row.image_sizes for row in rows], 2),
            "target_weights": _lists([row.target_weights for row in rows], pa.float32()),
        }
        return pa.RecordBatch.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)

    def _render(self, sample: Sample, grids: Sequence[image.Grid], frames: Sequence[int]) -> TokenSequence:
        image_tokens: Iterator[MediumTokens] = (_token_grid(grid, self._image.merge) for grid in grids)
        audio_tokens: Iterator[MediumTokens] = map(self._audio.num_tokens, frames)
        order = [segment for segment in sample.segments if isinstance(segment, Image | Audio)]
        return self._template.render(
            sample, [next(image_tokens if isinstance(segment, Image) else audio_tokens) for segment in order]
        )


def cut_out(recording: Audio, spec: AudioSpec) -> Audio:
    """Return the part of a recording that a record means, as a recording of its own. Raises BadSampleError."""
    return recording if recording.part is None else Audio(data=blaming(AUDIO, audio.cut, recording.data, *recording.part, spec))


def probe_of(name: str, sizes: Sizes) -> Probe:
    """Return the probe of a sample: its name and sizes, as reported to the reorder service."""
    return Probe(
        name=name,
        num_tokens=len(sizes.sequence.input_ids),
        num_targets=sizes.sequence.num_targets,
        image_patches=tuple(grid.height * grid.width for grid in sizes.grids for _ in range(grid.tiles)),
        mel_frames=sizes.mel_frames,
        is_truncated=sizes.sequence.is_truncated,
        target_weight=sizes.sequence.target_weight,
    )


def _token_grid(grid: image.Grid, merge: int) -> MediumTokens:
    """Return how the tokens of an image with this patch grid are arranged."""
    if grid.anyres is not None:
        return grid.tokens(merge)
    return TokenGrid(
        height=grid.height // merge,
        width=grid.width // merge,
        rows=grid.rows,
        columns=grid.columns,
        whole=grid.whole,
        crops=grid.crops,
    )


def _sizes_of_tiles(grid: image.Grid) -> list[tuple[int, int]]:
    """Return the image's (height, width) for its first tile and (0, 0) for each other one, where trainers need it."""
    tiled = grid.anyres
    return [] if tiled is None else [(tiled.height, tiled.width), *[(0, 0)] * (grid.tiles - 1)]


def _lists(arrays: list[NDArray[np.int32]] | list[NDArray[np.float32]], kind: pa.DataType) -> pa.ListArray:
    return pa.ListArray.from_arrays(_offsets([array.size for array in arrays], np.int32), _values(arrays, kind))


def _tuples(arrays: list[NDArray[np.int32]], width: int) -> pa.ListArray:
    """Return a list of rows for each array (n, width)."""
    rows = pa.FixedSizeListArray.from_arrays(_values(arrays, pa.int32()), width)
    return pa.ListArray.from_arrays(_offsets([len(array) for array in arrays], np.int32), rows)


def _large_lists(
    sizes: list[int], arrays: list[NDArray[np.uint8]] | list[NDArray[np.float16]], kind: pa.DataType
) -> pa.LargeListArray:
    return pa.LargeListArray.from_arrays(_offsets(sizes, np.int64), _values(arrays, kind))


def _offsets(sizes: list[int], dtype: type[np.int32] | type[np.int64]) -> pa.Array:
    offsets = np.zeros(len(sizes) + 1, dtype)
    np.cumsum(sizes, out=offsets[1:])
    return pa.array(offsets)


def _values(arrays: Sequence[NDArray[np.generic]], kind: pa.DataType) -> pa.Array:
    flat = [array.reshape(-1) for array in arrays if array.size]
    return pa.array((flat[0] if len(flat) == 1 else np.concatenate(flat)) if flat else [], kind)
