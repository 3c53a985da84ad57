"""M4A, AAC and WebM: exactly the sound that was encoded, known from the header, and no file that is cut or asks for much."""

from __future__ import annotations

import io
import struct
from functools import lru_cache
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from headrace.preprocessor import audio
from headrace.preprocessor.audio import container, container_bounds
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import AudioSpec
from tests.examples import with_examples

SPEC = AudioSpec()
Sound = np.ndarray[Any, Any]


def sweep(num_samples: int, rate: int) -> Sound:
    """Louder and higher towards the end, so that every part of it is told from every other."""
    time = np.arange(num_samples) / rate
    return 0.5 * np.arange(num_samples) / num_samples * np.sin(2 * np.pi * (200 + 300 * time) * time)


@lru_cache(maxsize=64)
def encoded(kind: str, codec: str, rate: int = 48_000, num_samples: int = 100_000, layout: str = "stereo") -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout, options={"strict": "-2"})
        channels = stream.codec_context.channels
        samples = np.repeat((sweep(num_samples, rate) * 32_767).astype(np.int16), channels)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout=layout)
        frame.rate, frame.pts = rate, 0
        fifo = av.AudioFifo()
        for part in av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate).resample(frame):
            fifo.write(part)
        size = stream.codec_context.frame_size or 4096
        parts = [*iter(lambda: fifo.read(size), None), fifo.read()]
        for part in [*(part for part in parts if part is not None), None]:
            output.mux(stream.encode(part))
    return buffer.getvalue()


def refusal(data: bytes, spec: AudioSpec = SPEC) -> Reason:
    with pytest.raises(BadSampleError) as refused:
        audio.decode(data, spec)
    return refused.value.reason


def lag(heard: Sound, meant: Sound) -> int:
    """By how many samples one sound is behind the other, by their correlation."""
    size = 2 * len(meant)
    product = np.fft.irfft(np.fft.rfft(heard, size) * np.conj(np.fft.rfft(meant, size)), size)
    best = int(np.argmax(product))
    return best if best < len(meant) else best - size


EXACT = [
    ("ipod", "aac", 44_100),
    ("mp4", "aac", 16_000),
    ("mov", "alac", 48_000),
    ("ipod", "alac", 44_100),
    ("matroska", "alac", 44_100),
    ("webm", "libopus", 48_000),
    ("mp4", "libopus", 48_000),
]
PADDED = [("adts", "aac", 44_100), ("matroska", "aac", 44_100), ("webm", "vorbis", 44_100)]


@pytest.mark.parametrize(("kind", "codec", "rate"), EXACT)
@pytest.mark.parametrize("num_samples", [30_000, 100_000, 1024 * 40, 1920])
@pytest.mark.parametrize("layout", ["mono", "stereo"])
def test_a_file_has_exactly_the_samples_that_were_encoded(
    kind: str, codec: str, rate: int, num_samples: int, layout: str
) -> None:
    data = encoded(kind, codec, rate, num_samples, layout)
    header = audio.read_header(data, SPEC)
    assert (header.sample_rate, header.channels, header.frames) == (rate, 1 if layout == "mono" else 2, num_samples)
    heard = audio.read_mono(data, SPEC)
    assert len(heard) == num_samples
    meant = sweep(num_samples, rate)
    if codec == "alac":
        np.testing.assert_allclose(heard, meant, atol=5e-5)
    elif num_samples > 1920:
        assert lag(heard, meant) == 0
        assert np.abs(heard - meant).mean() < 0.03


@pytest.mark.parametrize(("kind", "codec", "rate"), PADDED)
def test_containers_that_do_not_tell_the_end_give_what_decodes(kind: str, codec: str, rate: int) -> None:
    header, heard = (read(encoded(kind, codec, rate), SPEC) for read in (audio.read_header, audio.read_mono))
    assert isinstance(header, audio.Header)
    assert len(heard) == header.frames
    assert 100_000 - 1024 <= header.frames <= 100_000 + 2048
    with av.open(io.BytesIO(encoded(kind, codec, rate))) as file:
        assert header.frames == sum(frame.samples for frame in file.decode(audio=0))


def with_edit(data: bytes, milliseconds: int, media_time: int) -> bytes:
    """Another edit list, in a file of FFmpeg whose movie time is in milliseconds."""
    at = data.index(b"elst") + 12
    return data[:at] + struct.pack(">II", milliseconds, media_time) + data[at + 8 :]


@pytest.mark.parametrize(
    ("milliseconds", "media_time", "frames"), [(1000, 1024, 48_000), (1000, 3000, 48_000), (2083, 2112, 98_912)]
)
def test_edit_lists_say_where_the_sound_begins_and_ends(milliseconds: int, media_time: int, frames: int) -> None:
    data = encoded("ipod", "aac")
    edited = with_edit(data, milliseconds, media_time)
    heard = audio.read_mono(edited, SPEC)
    assert len(heard) == audio.read_header(edited, SPEC).frames == frames
    whole = audio.read_mono(data, SPEC)
    begin = media_time - 1024
    np.testing.assert_array_equal(heard, whole[begin : begin + frames])


def test_features_are_those_of_the_same_sound_in_another_format() -> None:
    data = encoded("ipod", "alac", 16_000, 40_000, "mono")
    samples = audio.read_mono(data, SPEC)

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 16_000, format="WAV", subtype="FLOAT")
    np.testing.assert_array_equal(audio.decode(data, SPEC), audio.decode(buffer.getvalue(), SPEC))
    assert audio.probe(data, SPEC) == 250


@pytest.mark.parametrize(("kind", "codec", "rate"), [*EXACT, *PADDED])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_ends_early_is_refused(kind: str, codec: str, rate: int, share: float) -> None:
    data = encoded(kind, codec, rate)
    assert refusal(data[: int(share * len(data))]) is Reason.CORRUPT_MEDIA


def test_films_and_other_codecs_are_refused_by_name() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        for _ in range(3):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))))
        output.mux(stream.encode(None))
    with pytest.raises(BadSampleError, match="unsupported_media: MPEG-4 with a film; write its sound to a file of its own"):
        audio.decode(buffer.getvalue(), SPEC)
    with pytest.raises(BadSampleError, match="unsupported_media: Matroska with pcm_s16le is not taken; convert it to FLAC"):
        audio.decode(encoded("matroska", "pcm_s16le"), SPEC)


def test_without_the_library_the_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "_library", None)
    with pytest.raises(BadSampleError, match=r"MPEG-4 needs PyAV on the preprocessor: pip install headrace\[av\]"):
        audio.probe(encoded("ipod", "aac"), SPEC)


def box(name: bytes, *content: bytes) -> bytes:
    return (8 + len(b"".join(content))).to_bytes(4, "big") + name + b"".join(content)


def movie(*tables: bytes) -> bytes:
    begin = box(b"ftyp", b"M4A \0\0\0\0")
    return begin + box(b"moov", box(b"trak", box(b"mdia", box(b"minf", box(b"stbl", *tables)))))


@pytest.mark.parametrize(
    "table",
    [
        box(b"stsz", struct.pack(">III", 0, 4, 2**32 - 1)),
        box(b"stsz", struct.pack(">III", 0, 0, 2**31)),
        box(b"stts", struct.pack(">IIII", 0, 1, 2**32 - 1, 1024)),
        box(b"stts", struct.pack(">IIII", 0, 2**31, 1, 1024)),
        box(b"ctts", struct.pack(">IIII", 0, 1, 2**30, 0)),
        box(b"trun", struct.pack(">II", 0, 2**31)),
        box(b"elst", struct.pack(">II", 0, 2**31)),
        box(b"stbl", *[box(b"free")] * 100_001),
    ],
)
def test_tables_that_speak_of_more_than_the_file_has_are_refused_before_anything_is_made_for_them(table: bytes) -> None:
    with pytest.raises(BadSampleError, match="corrupt_media"):
        container_bounds.check(movie(table), "MPEG-4")


@pytest.mark.parametrize(("num_edits", "is_taken"), [(0, True), (1, True), (39, True), (41, False)])
def test_edits_that_would_have_the_samples_listed_over_and_over_are_refused(num_edits: int, is_taken: bool) -> None:
    num_samples = 100_000
    edits = box(b"elst", struct.pack(">II", 0, num_edits), bytes(12 * num_edits))
    data = movie(box(b"stsz", struct.pack(">III", 0, 1, num_samples)), edits) + box(b"mdat", bytes(num_samples))
    if is_taken:
        container_bounds.check(data, "MPEG-4")
    else:
        with pytest.raises(BadSampleError, match="41 edits of 100000 samples") as refused:
            container_bounds.check(data, "MPEG-4")
        assert refused.value.reason is Reason.TOO_LARGE


def test_counting_that_takes_decoding_ends_where_a_recording_is_refused() -> None:
    data = encoded("webm", "vorbis", 44_100)
    counted = container.ContainerFile(data, "Matroska", lambda rate: rate // 2).frames
    assert 22_050 < counted < 30_000
    assert refusal(data, AudioSpec(max_seconds=0.5)) is Reason.TOO_LONG
    whole = audio.read_header(data, SPEC).frames
    assert audio.read_header(data, AudioSpec(max_seconds=whole / 44_100)).frames == whole


class Pipe(io.RawIOBase):
    """What a live stream is written to: nothing in it can be written again."""

    def __init__(self) -> None:
        self.written = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.written += data
        return len(data)


def test_a_live_recording_is_whole_or_refused_where_a_block_is_cut() -> None:
    pipe = Pipe()
    with av.open(io.BytesIO(encoded("webm", "libopus"))) as file, av.open(pipe, "w", format="webm", options={"live": "1"}) as out:
        stream = out.add_stream_from_template(file.streams.audio[0])
        for packet in file.demux(audio=0):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    data = bytes(pipe.written)
    assert audio.read_header(data, SPEC).frames == len(audio.read_mono(data, SPEC)) >= 100_000 - 960
    for missing in (1, 20, len(data) // 2):
        assert refusal(data[:-missing]) is Reason.CORRUPT_MEDIA


@with_examples(150)
@given(
    st.sampled_from([*EXACT, *PADDED]),
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), min_size=1, max_size=5),
)
def test_damage_gives_a_recording_or_a_refusal(kind: tuple[str, str, int], changes: list[tuple[float, bytes]]) -> None:
    data = bytearray(encoded(*kind, num_samples=20_000))
    for place, changed in changes:
        at = int(place**3 * (len(data) - len(changed)))  # mostly near the beginning, where the headers are
        data[at : at + len(changed)] = changed
    try:
        frames = audio.probe(bytes(data), SPEC)
        assert len(audio.decode(bytes(data), SPEC)) == frames
    except BadSampleError:
        pass


@with_examples(60)
@given(st.sampled_from([b"\0\0\0\x18ftypM4A ", b"\xff\xf1\x50\x80", b"\x1a\x45\xdf\xa3\x9f"]), st.binary(max_size=300))
def test_anything_behind_the_beginning_of_a_file_is_refused(begin: bytes, rest: bytes) -> None:
    with pytest.raises(BadSampleError):
        audio.probe(begin + rest, SPEC)
