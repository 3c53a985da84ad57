"""Recordings: header probe, decoding to mono, resampling, and log-mel features.

It takes WAV, FLAC, MP3, Ogg (Vorbis, Opus), CAF (with ALAC too) and the other uncompressed formats of libsndfile, and with PyAV
M4A, AAC and WebM (`headrace.preprocessor.audio.container`), by content and not by name. With or without the fast codec of
`headrace.preprocessor.audio.flac`, a file gives the same samples or the same refusal.

The number of mel frames follows from the header alone (for an MP3 that does not state its length, from all its frame headers):
a recording of n frames at rate r has N = ceil(n * sample_rate / r) samples after resampling and N // hop mel frames, or one more
with `AudioSpec.last_frame`. Decoding must give exactly n frames, else the file is corrupt_media; so probe and decode agree. A
recording shorter than one analysis window is empty_media. A recording that a job splits is resampled as a whole and then cut, and
the features of each piece are those of a recording of its own.

Features (Whisper, arXiv:2212.04356, section 2.2): Hann window, power spectrum, Slaney mel filters, log10 with a floor of
1e-10, clamped to 8 below the clip's maximum, then (x + 4) / 4. Centred windows with reflected ends; the last, incomplete
frame is dropped, or has silence behind the recording (`AudioSpec.last_frame`).

Spectra are floating-point sums, so the last bit of a feature may differ between kinds of processors.

All functions are thread-safe. torch, which computes the features (`headrace.preprocessor.audio.features`), is imported with the
first recording that is decoded: that takes two seconds and 200 MB, for which jobs without recordings have no use.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import soundfile
from numpy.typing import NDArray

from headrace.preprocessor.audio import flac, mp3, ogg
from headrace.preprocessor.audio.analysis_window import silence_behind, window_samples
from headrace.preprocessor.audio.container import ContainerFile, takes
from headrace.preprocessor.decode_memory import room_for
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import AudioSpec

_FORMATS = frozenset(("WAV", "WAVEX", "RF64", "W64", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF"))
_OTHER_KINDS = {
    "MPEG-4": (4, (b"ftyp",)),
    "AAC": (0, (b"\xff\xf1", b"\xff\xf9")),
    "AMR": (0, (b"#!AMR",)),
    "Windows Media": (0, (b"\x30\x26\xb2\x75",)),
    "Matroska": (0, (b"\x1a\x45\xdf\xa3",)),
}
_SEEKABLE = frozenset(("WAV", "WAVEX", "RF64", "W64", "FLAC", "AIFF", "AU"))
_SLACK_S = 0.05  # durations in manifests are rounded
_END_SLACK_S = 0.5  # those of MP3 are often guessed
_MAX_RATE = 384_000  # Hz, the highest of common converters; bounds the memory of a recording together with max_seconds
_BLOCK_SAMPLES = 2**19  # samples per block over all channels, of which a WAV may have a thousand
_FRAME_BYTES = 4  # of mono sound
_RESAMPLING_BYTES = 6  # for each frame: the padded signal, and the samples that each of the filters reads

Waveform = NDArray[np.float32]
File: TypeAlias = "soundfile.SoundFile | ContainerFile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a recording's header says: sample rate in Hz, channels, and frames (samples of each channel)."""

    sample_rate: int
    channels: int
    frames: int


def probe(data: bytes, spec: AudioSpec) -> int:
    """Return the number of mel frames that `decode` will give for a recording, from its header alone.

    Raises BadSampleError with empty_media, corrupt_media, unsupported_media, too_long or too_large.
    """
    return _mel_frames(read_header(data, spec), spec)


def decode(data: bytes, spec: AudioSpec) -> NDArray[np.float16]:
    """Decode a recording to log-mel features of shape (frames, mel_bins), float16.

    Waits for memory while other threads decode (headrace.preprocessor.decode_memory). Raises BadSampleError with the reasons
    of `probe`.
    """
    from headrace.preprocessor.audio.features import log_mel  # of torch

    with _open(data, partial(_most_frames, spec)) as file:
        header = _checked(file, spec)
        with room_for(decode_bytes(header, spec)):
            mono = _read(file, data, header)
            is_split, frames = _is_split(header, spec), _mel_frames(header, spec)
            lengths = frames_of_pieces(frames, spec) if is_split else (frames,)
            mel, finite = log_mel(mono, header.sample_rate, _num_samples(header, spec), is_split, lengths, spec)
    if not finite:
        raise BadSampleError(Reason.CORRUPT_MEDIA, "samples are too large to have a spectrum")
    return mel


def cut(data: bytes, start_s: float, seconds: float, spec: AudioSpec) -> bytes:
    """Return a part of a recording as a WAV file of one channel, or the recording itself if the part is all of it.

    The part's frames are those that NeMo reads: from int(start_s * rate) on, int(seconds * rate) of them. Raises BadSampleError
    with the reasons of `probe`, and with schema_error if the recording has no such part.
    """
    with _open(data, lambda _: _most_in_memory(spec)) as file:
        rate, slack = file.samplerate, int(_SLACK_S * file.samplerate)
        start, frames = int(start_s * rate), int(seconds * rate)
        if start == 0 and file.frames <= frames + slack:
            return data
        if start >= file.frames or start + frames > file.frames + int(_END_SLACK_S * rate):
            raise BadSampleError(
                Reason.SCHEMA_ERROR,
                f"the part from {start_s:g} s on, of {seconds:g} s, is not in a recording of {file.frames / rate:.1f} s: list "
                "'offset' and 'duration' under the mapping's ignore where it is cut already",
            )
        header = Header(sample_rate=rate, channels=file.channels, frames=min(frames, file.frames - start))
        _check(header, spec)
        mono = np.empty(header.frames, np.float32)
        whole = replace(header, frames=file.frames)
        at, blocks = -start, None
        if not isinstance(file, ContainerFile) and file.format in _SEEKABLE:
            at, blocks = 0, _blocks(file, whole)
            file.seek(start)
        try:
            for block in blocks or _decoded(file, data, whole):
                piece = block[max(0, -at) : max(0, len(mono) - at)]
                _mono(piece, mono[max(0, at) : max(0, at) + len(piece)])
                at += len(block)
                if at >= len(mono):
                    break
        except soundfile.SoundFileError as err:
            raise BadSampleError(Reason.CORRUPT_MEDIA, f"the recording does not decode: {err}") from err
    if at < len(mono):
        raise BadSampleError(Reason.CORRUPT_MEDIA, f"the recording ends {len(mono) - at} frames before its header says")
    buffer = io.BytesIO()
    soundfile.write(buffer, mono, rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def frames_of_pieces(mel_frames: int, spec: AudioSpec) -> tuple[int, ...]:
    """Return the mel frames of each piece that a recording of `mel_frames` is split into; one that is not too long is one."""
    full, rest = divmod(mel_frames, spec.most_frames)
    return (spec.most_frames,) * full + ((rest,) if rest else ())


def read_header(data: bytes, spec: AudioSpec) -> Header:
    """Read the header of a recording and check all limits. Raises BadSampleError with the reasons of `probe`."""
    with _open(data, partial(_most_frames, spec)) as file:
        return _checked(file, spec)


def read_mono(data: bytes, spec: AudioSpec) -> Waveform:
    """Decode a recording to mono, the mean of all channels, at its own rate; shape (header.frames,), float32.

    Raises BadSampleError with the reasons of `probe`.
    """
    with _open(data, partial(_most_frames, spec)) as file:
        return _read(file, data, _checked(file, spec))


def _read(file: File, data: bytes, header: Header) -> Waveform:
    """Decode to mono in blocks, so that neither many channels nor a header that promises too much cost memory."""
    mono = np.empty(header.frames, np.float32)
    frames = 0
    try:
        for block in _decoded(file, data, header):
            if frames + len(block) <= len(mono):
                _mono(block, mono[frames : frames + len(block)])
            frames += len(block)
    except soundfile.SoundFileError as err:
        raise BadSampleError(Reason.CORRUPT_MEDIA, f"the recording does not decode: {err}") from err
    if frames != header.frames:
        raise BadSampleError(Reason.CORRUPT_MEDIA, f"the header says {header.frames} frames, there are {frames}")
    if not (np.isfinite(mono.min()) and np.isfinite(mono.max())):
        raise BadSampleError(Reason.CORRUPT_MEDIA, "samples that are no finite numbers")
    return mono


def _decoded(file: File, data: bytes, header: Header) -> Iterator[NDArray[np.float32]]:
    """Yield the decoded recording in blocks of shape (frames, channels)."""
    if isinstance(file, ContainerFile):
        yield from file.blocks()
        return
    if file.format == "FLAC" and flac.suits(header.frames * header.channels):
        file.read(1)  # lets libsndfile check the metadata, with which the fast codec is lenient
        samples = flac.decode(data, header.frames, header.channels)
        if samples is not None:
            yield samples
            return
        file.seek(0)
    elif file.subtype == "OPUS":
        file.seek(0)  # else libsndfile returns the codec's delay as sound, unless it wrote the file itself, and ends early
    yield from _blocks(file, header)


def _blocks(file: soundfile.SoundFile, header: Header) -> Iterator[NDArray[np.float32]]:
    """Yield what follows in a file, in blocks of shape (frames, channels)."""
    while len(block := file.read(max(1, _BLOCK_SAMPLES // header.channels), dtype="float32", always_2d=True)):
        yield block


def _mono(block: NDArray[np.float32], out: Waveform) -> None:
    """Write the mean over channels of (frames, channels) into `out`, by channel: numpy is slow at sums of few neighbours."""
    out[:] = block[:, 0]
    for channel in range(1, block.shape[1]):
        out += block[:, channel]
    if block.shape[1] > 1:
        out /= np.float32(block.shape[1])


def _open(data: bytes, most_frames: Callable[[int], int]) -> File:
    """Open a recording and read its header; the frames of an MP3 that does not state their number are counted first.

    `most_frames`: see ContainerFile.
    """
    if not data:
        raise BadSampleError(Reason.EMPTY_MEDIA, "the recording has 0 bytes")
    ogg.check(data)
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
        if file.format == "MP3" and (counted := mp3.with_length(data)) is not data:
            file.close()
            file = soundfile.SoundFile(io.BytesIO(counted))
    except soundfile.SoundFileError as err:
        for kind, (offset, magics) in _OTHER_KINDS.items():
            if data.startswith(magics, offset):
                if takes(kind):
                    return ContainerFile(data, kind, most_frames)
                raise BadSampleError(Reason.UNSUPPORTED_MEDIA, f"{kind} is not taken; convert it to FLAC") from err
        raise BadSampleError(Reason.CORRUPT_MEDIA, f"no recording: {err}") from err
    if file.format not in _FORMATS:
        file.close()
        raise BadSampleError(Reason.UNSUPPORTED_MEDIA, f"{file.format} is not taken; convert it to FLAC")
    return file


def _most_frames(spec: AudioSpec, rate: int) -> int:
    """Return frames at a rate beyond which a recording is refused in any case: for its length, or what its mono sound takes."""
    most = _most_in_memory(spec)
    return most if spec.too_long == "split" else min(most, math.floor(spec.most_samples(rate)))


def _most_in_memory(spec: AudioSpec) -> int:
    return spec.max_decode_mib * 2**20 // _FRAME_BYTES


def _checked(file: File, spec: AudioSpec) -> Header:
    header = Header(sample_rate=file.samplerate, channels=file.channels, frames=file.frames)
    _check(header, spec)
    return header


def _check(header: Header, spec: AudioSpec) -> None:
    """Raise BadSampleError if a recording with this header is not taken."""
    if header.frames == 0:
        raise BadSampleError(Reason.EMPTY_MEDIA, "the recording has 0 frames")
    if header.frames >= 2**62:  # libsndfile's number for a FLAC stream of unknown length
        raise BadSampleError(Reason.UNSUPPORTED_MEDIA, "the header gives no length; encode the recording anew")
    if not 0 < header.sample_rate <= _MAX_RATE:
        raise BadSampleError(Reason.UNSUPPORTED_MEDIA, f"{header.sample_rate} Hz; rates up to {_MAX_RATE} are taken")
    seconds = header.frames / header.sample_rate
    if header.frames > spec.most_samples(header.sample_rate) and spec.too_long == "refuse":
        raise BadSampleError(Reason.TOO_LONG, f"{seconds:.1f} s, longer than {spec.max_seconds:g} s")
    if header.frames < spec.min_seconds * header.sample_rate:
        raise BadSampleError(Reason.TOO_SHORT, f"{seconds:.3g} s, shorter than {spec.min_seconds:g} s")
    if _num_samples(header, spec) < _shortest(spec):
        raise BadSampleError(Reason.EMPTY_MEDIA, f"{header.frames} frames at {header.sample_rate} Hz make no window or no token")
    _check_cost(header, spec)


def _check_cost(header: Header, spec: AudioSpec) -> None:
    """Raise BadSampleError (too_large) if decoding would take more memory than the spec allows."""
    taken = -(-decode_bytes(header, spec) // 2**20)
    if taken > spec.max_decode_mib:
        what = f"{header.frames / header.sample_rate:.1f} s at {header.sample_rate} Hz"
        detail = f"decoding {what} takes {taken} MiB, more than audio.max_decode_mib ({spec.max_decode_mib})"
        raise BadSampleError(Reason.TOO_LARGE, detail)


def decode_bytes(header: Header, spec: AudioSpec) -> int:
    """Return the peak memory of decoding in bytes, without the file: that of reading, resampling or computing spectra.

    It is the same with or without the fast codec for FLAC, which has all channels in memory twice.
    """
    channels = header.frames * header.channels
    reading = 8 * (channels if channels <= flac.MOST_SAMPLES else _BLOCK_SAMPLES)
    samples, window = _num_samples(header, spec), window_samples(spec)
    at_once = min(samples, spec.most_frames * spec.hop_samples) if _is_split(header, spec) else samples
    resampling = 0 if header.sample_rate == spec.sample_rate else _RESAMPLING_BYTES * header.frames + 4 * samples
    at_once += silence_behind(at_once, spec)
    frames, bins = at_once // spec.hop_samples, window // 2 + 1
    spectra = 4 * samples + 8 * at_once + frames * max(4 * window + 8 * bins, 16 * bins + 8 * spec.mel_bins)
    spectra += 2 * _mel_frames(header, spec) * spec.mel_bins if _is_split(header, spec) else 0  # the features of all pieces
    return _FRAME_BYTES * header.frames + max(reading, resampling, spectra) + 4 * bins * spec.mel_bins


def _num_samples(header: Header, spec: AudioSpec) -> int:
    return -(-header.frames * spec.sample_rate // header.sample_rate)


def _is_split(header: Header, spec: AudioSpec) -> bool:
    return spec.too_long == "split" and header.frames > spec.most_samples(header.sample_rate)


def _mel_frames(header: Header, spec: AudioSpec) -> int:
    """Return the mel frames of a recording, without those of a last piece that is shorter than an analysis window."""
    samples = _num_samples(header, spec)
    if _is_split(header, spec):
        rest = samples % (spec.most_frames * spec.hop_samples)
        samples -= rest if rest < _shortest(spec) else 0
    return spec.num_frames(samples)


def _shortest(spec: AudioSpec) -> int:
    """Return the fewest samples that have a spectrum and make a token."""
    padded = spec.hop_samples - 1 if spec.last_frame == "pad" else 0
    frames = spec.frames_per_token - 1 if spec.last_token == "drop" else 1
    return max(window_samples(spec), spec.hop_samples, frames * spec.hop_samples - padded)
