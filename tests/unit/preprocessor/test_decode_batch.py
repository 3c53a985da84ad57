"""A part is decoded right into its batch, in the order of the plan, without what turns out to be damaged."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import soundfile

from headrace.manifest import ShardInfo
from headrace.preprocessor.decoding import LoadedSample, Row, SampleProcessor
from headrace.preprocessor.job_work import JobWork
from headrace.preprocessor.payload.arena import Arena
from headrace.preprocessor.payload.probe_cache import ProbeCache
from headrace.preprocessor.payload.writer import PayloadWriter
from headrace.quarantine import Reason
from headrace.sample import SampleRef
from headrace.spec import JobSpec
from headrace.transport.base import read_batches

NAMES = ("whole", "cut", "sound", "words", "last")


def recording(seconds: float) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.sin(np.arange(int(seconds * 16_000)) / 30), 16_000, format="FLAC")
    return buffer.getvalue()


@pytest.fixture
def job(tmp_path: Path, spec: JobSpec, write_tar: Callable[..., Path], jpeg: bytes, hostile: Path) -> Iterator[JobWork]:
    """Five samples; the second one's pixels are cut short behind a sound header."""
    png = (hostile / "images" / "rgba.png").read_bytes()
    members: dict[str, Any] = {
        "whole.0.jpg": jpeg,
        "whole.1.png": png,
        "whole.json": {"images": ["0.jpg", "1.png"], "texts": ["<image> and <image>"]},
        "cut.jpg": jpeg[:-200],
        "cut.json": {"images": ["jpg"], "texts": ["<image>"]},
        "sound.flac": recording(0.7),
        "sound.json": {"audios": ["flac"], "texts": ["<audio>", "what it is"]},
        "words.json": {"texts": ["only words"]},
        "last.jpg": jpeg,
        "last.flac": recording(0.3),
        "last.json": {"images": ["jpg"], "audios": ["flac"], "texts": ["<image><audio>", "both"]},
    }
    job = JobWork("test", spec)
    job.shards = (ShardInfo(source=0, url=str(write_tar(members)), name="data/shard.tar"),)
    yield job
    job.close()


def refs(*names: str) -> list[SampleRef]:
    return [SampleRef(sample_id=100 + NAMES.index(name), shard=0, row=NAMES.index(name)) for name in names]


def cells(batch: pa.RecordBatch, column: str) -> list[list[Any]]:
    return [list(cell) for cell in batch.column(column).to_pylist()]


def row_of(job: JobWork, name: str) -> Row:
    (ref,) = refs(name)
    row = job._attempt(ref, job.processor.decode)
    assert isinstance(row, Row)
    return row


def test_rows_come_in_the_given_order_with_their_values(job: JobWork) -> None:
    order = ["last", "words", "whole", "sound"]
    batch, rejected = job.decode_batch(refs(*order))
    batch.validate(full=True)
    assert rejected == ()
    assert batch.column("sample_id").to_pylist() == [104, 103, 100, 102]
    for name, patches, mel in zip(order, cells(batch, "patches"), cells(batch, "mel"), strict=True):
        row = row_of(job, name)
        assert patches == row.patches.reshape(-1).tolist()
        assert mel == row.mel.reshape(-1).tolist()


def test_damage_behind_the_header_is_left_out(job: JobWork) -> None:
    batch, rejected = job.decode_batch(refs("whole", "cut", "last"))
    batch.validate(full=True)
    assert batch.column("sample_id").to_pylist() == [100, 104]
    assert [(item.name, item.reason, item.sample_id) for item in rejected] == [("data/shard.tar/cut", Reason.CORRUPT_MEDIA, 101)]
    assert cells(batch, "patches") == [row_of(job, name).patches.reshape(-1).tolist() for name in ("whole", "last")]


def test_nothing_left(job: JobWork) -> None:
    batch, rejected = job.decode_batch(refs("cut"))
    assert (batch.num_rows, len(rejected)) == (0, 1)
    assert job.decode_batch([])[0].num_rows == 0


def test_what_was_probed_here_is_not_tokenised_again(job: JobWork, monkeypatch: pytest.MonkeyPatch) -> None:
    order = refs("whole", "sound", "words")
    alone, _ = job.decode_batch(order)
    job.probe(order)
    with monkeypatch.context() as patch:
        patch.setattr(SampleProcessor, "size", lambda *_: pytest.fail("sized twice"))
        assert job.decode_batch(order)[0].equals(alone)
    assert job.decode_batch(order)[0].equals(alone)  # evicted and asked for once more: sized anew


def test_what_stays_in_memory_since_it_was_probed_is_not_read_again(job: JobWork, monkeypatch: pytest.MonkeyPatch) -> None:
    order = refs("whole", "sound", "words")
    alone, _ = job.decode_batch(order)
    keeping = JobWork("test", job.spec, media=ProbeCache[LoadedSample](1 << 20))
    keeping.shards = job.shards
    keeping.probe(order)
    with monkeypatch.context() as patch:
        patch.setattr(SampleProcessor, "load", lambda *_: pytest.fail("read twice"))
        assert keeping.decode_batch(order)[0].equals(alone)
    assert keeping.decode_batch(order)[0].equals(alone)  # evicted and asked for once more: read anew
    keeping.close()


def test_what_was_probed_and_then_changed_is_refused(job: JobWork) -> None:
    order = refs("whole", "last")
    job.probe(order)
    job._sizes.put(job.name, order[0], job._sizes.take(job.name, order[1]), 0)  # type: ignore[arg-type]
    batch, rejected = job.decode_batch(order)
    assert batch.column("sample_id").to_pylist() == [104]
    assert [item.reason for item in rejected] == [Reason.CORRUPT_MEDIA]


def test_pixels_and_sound_are_decoded_into_the_payload_itself(
    job: JobWork, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[tuple[int, int]] = []
    decode_into = SampleProcessor.decode_into

    def noting(processor: SampleProcessor, sized: Any, patches: Any, mel: Any) -> Row:
        filled.append((patches.ctypes.data, mel.ctypes.data))
        return decode_into(processor, sized, patches, mel)

    monkeypatch.setattr(SampleProcessor, "decode_into", noting)
    payload = job.decode(job.load(refs("whole", "last", "sound")), PayloadWriter(arena))
    (batch,) = read_batches(payload.data)
    assert payload.slot is not None
    assert filled[0] == (values("patches", batch), values("mel", batch))


@pytest.mark.parametrize("names", [("whole", "cut", "last"), ("whole", "last"), ("words",), ("sound",), ()])
def test_a_payload_in_shared_memory_is_the_same_as_on_the_heap(job: JobWork, arena: Arena, names: tuple[str, ...]) -> None:
    payload = job.decode(job.load(refs(*names)), PayloadWriter(arena))
    (batch,) = read_batches(payload.data)
    batch.validate(full=True)
    expected, rejected = job.decode_batch(refs(*names))
    assert batch.equals(expected)
    assert (payload.num_samples, payload.rejected) == (expected.num_rows, rejected)
    assert payload.slot is not None
    arena.free(payload.slot)
    assert arena.statistics().used_bytes == 0, "nothing else is kept"


def test_a_part_that_cannot_be_decoded_leaves_nothing_behind(job: JobWork, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> Row:
        raise MemoryError

    monkeypatch.setattr(SampleProcessor, "decode_into", no_memory)
    with pytest.raises(MemoryError):
        job.decode(job.load(refs("whole")), PayloadWriter(arena))
    assert arena.statistics().used_bytes == 0


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(64 << 20, tmp_path)
    yield arena
    arena.close()


def values(column: str, batch: pa.RecordBatch) -> int:
    return int(batch.column(column).values.buffers()[1].address)


def test_payload_is_the_batch_as_a_stream(job: JobWork) -> None:
    wanted = refs("whole", "cut", "last")
    batch, rejected = job.decode_batch(wanted)
    payload = PayloadWriter().write(batch, rejected)
    with pa.ipc.open_stream(payload.data) as reader:
        assert reader.read_next_batch().equals(batch)
    assert (payload.num_samples, payload.rejected) == (2, rejected)
