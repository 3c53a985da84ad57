"""The same pictures as tar and as Parquet: what a preprocessor delivers, reads and takes in memory, over an epoch from cold."""

from __future__ import annotations

import shutil
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.preprocess.inputs import large_photos
from benchmarks.preprocess.meter import Reading, most_memory_bytes, read_bytes
from benchmarks.preprocess.services import LONGEST_S, measure, services, trainer_command
from benchmarks.preprocess.workload import GLOBAL_BATCH, captions, job_spec, write_shards
from benchmarks.report import Rival, Row, Section, at_least, at_most
from benchmarks.timing import progress

SHARDS = 6
GROUP_BYTES = 100_000_000
"""Of a row group, as Hugging Face `datasets` writes it; two of them a file."""
GROUPS = 2
SHUFFLE_SHARDS = 2
"""Three times in an epoch all samples are in shards that were not read before, so that starting is not all that is measured."""
PIXELS = 224 * 224
"""Of a picture that is delivered: few, so that reading is a large part of the work."""
PREPROCESSORS = (("--threads", "1"), ("--threads", "1"))
TAR, DATASETS, ONE_GROUP = "tar", "Parquet, 100 MB a row group", "Parquet, one row group a file"
RATE_GOAL, MEMORY_GOAL, BYTES_GOAL = 0.8, 1.5, 1.2
_MIB = 1 << 20
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_SCHEMA = pa.schema([("image", _IMAGE), ("txt", pa.string())])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Epoch:
    """What delivering all samples once took, both preprocessors together."""

    reading: Reading
    """From the first batch on."""
    first_s: float
    """From the job's submission to its end, less the time of `reading`: with the start of the trainer's process."""
    samples: int
    read_bytes: int
    """By system calls, less what the cache's files hold: no less than was read of the data set, as some rows are read twice."""
    memory_bytes: int
    """At most, of the larger one; shared memory included."""


def sections(folder: Path, *, rounds: int, quick: bool) -> list[Section]:
    """Write the three layouts into `folder`, about 1.2 GB each, deliver each in turns, and compare."""
    writers: dict[str, Callable[[Path, int, int], None]] = {
        TAR: _write_tar,
        DATASETS: _write_datasets,
        ONE_GROUP: _write_one_group,
    }
    num_shards = 2 if quick else SHARDS
    rows = GROUPS * GROUP_BYTES * len(large_photos()) // sum(map(len, large_photos()))  # of a shard
    epochs: dict[str, list[_Epoch]] = {title: [] for title in writers}
    for number, (title, write) in enumerate(writers.items()):
        progress(f"formats: writing {num_shards * rows:,} pictures, {title}")
        (folder / str(number)).mkdir(parents=True)
        write(folder / str(number), num_shards, rows)
    for turn in range(rounds):
        for number, (title, runs) in enumerate(epochs.items()):
            progress(f"formats, round {turn + 1} of {rounds}: {title}")
            runs.append(_deliver(folder / str(number), folder / "cache", num_shards * rows))
    shutil.rmtree(folder)
    return [_compared(title, epochs[title], epochs[TAR]) for title in (DATASETS, ONE_GROUP)]


def _compared(title: str, ours: Sequence[_Epoch], tar: Sequence[_Epoch]) -> Section:
    pairs = list(zip(ours, tar, strict=True))
    rates = [one.reading.rate / other.reading.rate for one, other in pairs]
    memory = [one.memory_bytes / other.memory_bytes for one, other in pairs]
    read = [one.read_bytes / other.read_bytes for one, other in pairs]
    middle = len(pairs) // 2
    rates_detail = (
        f"rounds: {_list(rates)}; from submission to the first batch {ours[0].first_s:.1f} s, tar {tar[0].first_s:.1f} s"
    )
    rows = [
        Row(name="samples/s, over those of tar", value=sorted(rates)[middle], goal=at_least(RATE_GOAL), detail=rates_detail),
        Row(name="peak memory of a preprocessor, over that of tar", value=sorted(memory)[middle], goal=at_most(MEMORY_GOAL)),
        Row(name="bytes read of the data set, over those of tar", value=sorted(read)[middle], goal=at_most(BYTES_GOAL)),
        Row(name="samples/s", value=ours[0].reading.rate, unit="/s", rival=Rival(value=tar[0].reading.rate, source=TAR)),
        Row(
            name="peak memory (VmHWM)",
            value=ours[0].memory_bytes / _MIB,
            unit="MiB",
            rival=Rival(value=tar[0].memory_bytes / _MIB, source=TAR),
        ),
        Row(
            name="read a sample",
            value=ours[0].read_bytes / ours[0].samples / 1e6,
            unit="MB",
            rival=Rival(value=tar[0].read_bytes / tar[0].samples / 1e6, source=TAR),
            detail="rchar of both preprocessors, less what the cache's files hold",
        ),
    ]
    how = f"{ours[0].samples:,} pictures of 0.6 megapixels, {PIXELS:,} delivered, an epoch from an empty cache"
    return Section(title=f"{title}, beside tar: {how}; two cores", rows=rows)


def _deliver(data: Path, cache: Path, num_samples: int) -> _Epoch:
    cache.mkdir()
    with services([(*arguments, "--cache", str(cache)) for arguments in PREPROCESSORS]) as running:
        pids = running.preprocessor_pids
        before = sum(map(read_bytes, pids))
        begun_s = time.monotonic()
        job = running.submit(job_spec(data, epochs=1, shuffle_shards=SHUFFLE_SHARDS, image={"max_pixels": PIXELS}))
        watch = [option for pid in running.pids for option in ("--watch", str(pid))]
        reading = measure(trainer_command(running.endpoint, job, skip=GLOBAL_BATCH, seconds=LONGEST_S, extra=watch))
        took_s = time.monotonic() - begun_s
        cached = sum(path.stat().st_size for path in cache.glob("*.shard"))
        epoch = _Epoch(
            reading=reading,
            first_s=took_s - reading.seconds,
            samples=num_samples,
            read_bytes=sum(map(read_bytes, pids)) - before - cached,
            memory_bytes=max(map(most_memory_bytes, pids)),
        )
    shutil.rmtree(cache)
    return epoch


def _pictures(count: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield pictures and their captions. A comment makes each picture another one, which no dictionary holds once for all."""
    pictures, texts = large_photos(), captions()
    for number in range(count):
        picture = pictures[number % len(pictures)]
        comment = b"\xff\xfe" + struct.pack(">HQ", 10, number)
        yield picture[:2] + comment + picture[2:], texts[number % len(texts)]


def _write_tar(folder: Path, num_shards: int, rows: int) -> None:
    samples = ({"jpg": picture, "txt": text} for picture, text in _pictures(num_shards * rows))
    write_shards(folder / "tar", samples, num_shards * rows, num_shards)


def _write_datasets(folder: Path, num_shards: int, rows: int) -> None:
    """Write row groups and pages as `datasets` does, whose pages end where the content says."""
    _write_parquet(folder, num_shards, rows, -(-rows // GROUPS), use_content_defined_chunking=True, write_page_index=True)


def _write_one_group(folder: Path, num_shards: int, rows: int) -> None:
    """Write with pyarrow's defaults: its pages have 1,024 of the pictures."""
    _write_parquet(folder, num_shards, rows, rows)


def _write_parquet(folder: Path, num_shards: int, rows: int, group: int, **options: bool) -> None:
    pictures = _pictures(num_shards * rows)
    for number in range(num_shards):
        with pq.ParquetWriter(folder / f"train-{number:05d}-of-{num_shards:05d}.parquet", _SCHEMA, **options) as writer:
            left = rows
            while left:
                taken = list(islice(pictures, min(left, group)))
                images = [{"bytes": picture, "path": f"{left - at}.jpg"} for at, (picture, _) in enumerate(taken)]
                writer.write_table(pa.table([pa.array(images, _IMAGE), [text.decode() for _, text in taken]], schema=_SCHEMA))
                left -= len(taken)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
