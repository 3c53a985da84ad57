"""Recordings in MPEG-4 (.m4a, .mp4), ADTS (.aac) and Matroska (.webm, .mka) files, by FFmpeg's libraries (PyAV).

PyAV is installed with `headrace[av]`. The codecs are AAC, ALAC, Opus and Vorbis. A file has one stream of sound and no film.

What encoders put in front of the sound (priming) is left out as the file says it: by an edit list, Matroska's CodecDelay, or
Opus' pre-skip. So is what follows its end: MPEG-4 gives it by the last sample's duration or by an edit list, Matroska by
DiscardPadding. AAC in ADTS and Matroska has no end, and keeps the encoder's padding, as FFmpeg does.

The number of frames follows from the packets without decoding them. Vorbis and ALAC of Matroska, whose packets do not tell, are
decoded for it, up to the longest recording that is not refused.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from importlib import import_module
from itertools import accumulate, islice
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headrace.preprocessor.audio import container_bounds
from headrace.quarantine import BadSampleError, Reason

_DEMUXERS = {"MPEG-4": "mp4", "AAC": "aac", "Matroska": "matroska"}
"""FFmpeg's demuxers, by our names. No other may be chosen by what a file holds: some open further files."""
_CODECS = ("aac", "alac", "opus", "vorbis")
_FULL_SCALE = {"flt": 1.0, "s16": 2.0**15, "s32": 2.0**31}
_OPUS_RATE = 48_000
_MOST_ROUNDING = Fraction(1, 500)  # s: movie time is often in units of 1/600 or 1/1000 s
_LOOKED_AT = 3  # first frames, of which one at least is a whole packet's: priming is cut out of the first


def _installed() -> Any:
    try:
        return import_module("av")
    except ImportError:
        return None


_library = _installed()


def takes(kind: str) -> bool:
    """Whether files of a kind may be opened here, as far as PyAV is concerned."""
    return kind in _DEMUXERS


class ContainerFile:
    """A recording in a container, with its header as soundfile.SoundFile has it."""

    format = "container"
    subtype = ""

    def __init__(self, data: bytes, kind: str, most_frames: Callable[[int], int]) -> None:
        """Read the header of a file of a kind that `takes` affirms, and count its frames. Raises BadSampleError.

        `most_frames`: of a recording that is not refused for its length, by its sample rate. Where counting takes decoding, it
        ends behind so many, and `frames` are those that have been counted.
        """
        if _library is None:
            raise BadSampleError(
                Reason.UNSUPPORTED_MEDIA,
                f"{kind} needs PyAV on the preprocessor: pip install headrace[av], or convert it to FLAC",
            )
        container_bounds.check(data, kind)
        self._data, self._kind = data, kind
        with self._stream() as (container, stream):
            first = list(islice(container.decode(stream), _LOOKED_AT))
        if not first:
            raise BadSampleError(Reason.EMPTY_MEDIA, "the recording has 0 frames")
        self.samplerate: int = first[0].sample_rate
        self.channels: int = first[0].layout.nb_channels
        self._packet_frames = max(frame.samples for frame in first)
        self._begin = first[0].pts or 0
        most = most_frames(self.samplerate)
        with self._stream() as (container, stream):
            is_short = len(first) < _LOOKED_AT
            self._decodable = sum(frame.samples for frame in first) if is_short else self._count(container, stream, most)
        with self._stream() as (container, stream):
            whole = self._decodable <= most
            self.frames = min(self._decodable, self._end(container, stream)) if whole else self._decodable

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        """Decode the recording, and yield it in blocks of shape (frames, channels). Raises BadSampleError (corrupt_media)."""
        decoded = 0
        with self._stream() as (container, stream):
            for frame in container.decode(stream):
                if (frame.sample_rate, frame.layout.nb_channels) != (self.samplerate, self.channels):
                    raise BadSampleError(Reason.CORRUPT_MEDIA, "rate or channels change within the recording")
                if left := max(0, min(frame.samples, self.frames - decoded)):
                    yield _samples(frame)[:left]
                decoded += frame.samples
        if decoded != self._decodable:
            raise BadSampleError(Reason.CORRUPT_MEDIA, f"the packets have {self._decodable} frames, and {decoded} are decoded")

    @contextlib.contextmanager
    def _stream(self) -> Iterator[tuple[Any, Any]]:
        """Yield the open container and its one stream of sound. Raises BadSampleError."""
        try:
            with _library.open(io.BytesIO(self._data), format=_DEMUXERS[self._kind], metadata_errors="replace") as container:
                films = [film for film in container.streams.video if not film.disposition & film.disposition.attached_pic]
                sounds = container.streams.audio
                if films or len(sounds) != 1:
                    what = "a film" if films else f"{len(sounds)} streams of sound"
                    raise BadSampleError(
                        Reason.UNSUPPORTED_MEDIA, f"{self._kind} with {what}; write its sound to a file of its own"
                    )
                stream = sounds[0]
                codec = stream.codec_context
                if codec is None or codec.name not in _CODECS:
                    raise BadSampleError(
                        Reason.UNSUPPORTED_MEDIA,
                        f"{self._kind} with {codec.name if codec else 'an unknown codec'} is not taken; convert it to FLAC",
                    )
                codec.thread_count = 1
                yield container, stream
        except (_library.FFmpegError, ValueError, EOFError) as err:
            raise BadSampleError(Reason.CORRUPT_MEDIA, f"the recording does not decode: {err}") from err

    def _count(self, container: Any, stream: Any, most: int) -> int:
        """Return how many frames decoding gives, with what is cut off at the beginning and the end as the decoder does it.

        Where it takes decoding, return any number above `most` if there are more than so many.
        """
        codec = stream.codec_context.name
        is_exact = stream.time_base == Fraction(1, self.samplerate)
        if codec == "vorbis" or (codec == "alac" and not is_exact):
            decoded = accumulate(int(frame.samples) for frame in container.decode(stream))
            counted = 0
            for counted in decoded:
                if counted > most:
                    break
            return counted
        total, skip = 0, _opus_pre_skip(stream) if codec == "opus" else 0
        for packet in container.demux(stream):
            if packet.size == 0:
                continue  # the end
            frames = _opus_frames(packet) if codec == "opus" else packet.duration or 0 if codec == "alac" else self._packet_frames
            discarded = 0
            if packet.has_sidedata("skip_samples"):
                at_begin, discarded = struct.unpack_from("<II", bytes(packet.get_sidedata("skip_samples")))
                skip = at_begin or skip
            if not packet.is_discard:
                total += max(0, frames - min(skip, frames) - discarded)
            skip = max(0, skip - frames)
        return total

    def _end(self, container: Any, stream: Any) -> int:
        """Return the frame at which the file says that the sound ends, as far as MPEG-4 says it; else the last one."""
        if self._kind != "MPEG-4":
            return self._decodable
        end = max(
            ((packet.pts + (packet.duration or 0)) for packet in container.demux(stream) if packet.pts is not None), default=0
        )
        unit = stream.time_base * self.samplerate
        ends: list[int] = [self._decodable, math.ceil((end - self._begin) * unit)]
        if stream.duration is not None:
            of_edits = (stream.duration - self._begin) * unit
            ends += [int(of_edits)] if of_edits < min(ends) - _MOST_ROUNDING * self.samplerate else []
        return max(0, min(ends))


def _opus_pre_skip(stream: Any) -> int:
    """Return the frames that Opus' own header, as FFmpeg hands it on, has the decoder leave out (RFC 7845, section 5.1)."""
    head = bytes(stream.codec_context.extradata or b"")
    return int.from_bytes(head[10:12], "little") if head.startswith(b"OpusHead") else 0


def _opus_frames(packet: Any) -> int:
    """Return the frames at 48 kHz of an Opus packet, by its first bytes (RFC 6716, section 3)."""
    data = bytes(memoryview(packet)[:2])
    config, code = data[0] >> 3, data[0] & 3
    if config < 12:
        one = (480, 960, 1920, 2880)[config & 3]
    elif config < 16:
        one = (480, 960)[config & 1]
    else:
        one = (120, 240, 480, 960)[config & 3]
    count = (1, 2, 2)[code] if code < 3 else data[1] & 63 if len(data) > 1 else 0
    return one * count


def _samples(frame: Any) -> NDArray[np.float32]:
    """Return the samples of a frame between -1 and 1, (frames, channels)."""
    name = frame.format.name
    values = frame.to_ndarray()
    if not name.endswith("p"):
        values = values.reshape(frame.samples, -1).T
    scale = _FULL_SCALE.get(name.removesuffix("p"))
    if scale is None:
        raise BadSampleError(Reason.UNSUPPORTED_MEDIA, f"samples of the type {name} are not taken")
    floats: NDArray[np.float32] = values.astype(np.float32)
    return (floats if scale == 1.0 else floats / np.float32(scale)).T
