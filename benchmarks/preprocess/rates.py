"""`python -m benchmarks.preprocess.rates NAME`: one rate of a codec, measured in this process; printed as a number.

A process measures one contender, so that none gains or loses by what another left in the allocator. Rates of one core are by
that core's clock: what else runs on the machine counts little.
"""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, process_time

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from benchmarks.preprocess.inputs import EXAMPLE, camera_photos, clip, large_photos, members, photos, recordings
from benchmarks.timing import progress
from headrace.preprocessor import audio, image
from headrace.preprocessor.image import reference
from headrace.preprocessor.job_work import JobWork
from headrace.preprocessor.sources import list_shards, open_shard
from headrace.sample import SampleRef
from headrace.spec import AudioSpec, ImageSpec, JobSpec, parse_spec

IMAGE = ImageSpec()
SMALLER = ImageSpec(max_pixels=28 * 28 * 512)
REDUCED = ImageSpec(reduced_scale=True)
AUDIO = AudioSpec()
PASSES = 6
PART_SAMPLES = 8


def by_pillow(data: bytes, spec: ImageSpec) -> NDArray[np.uint8]:
    """Patches as one makes them with Pillow and numpy."""
    with Image.open(io.BytesIO(data)) as opened:
        rgb = opened.convert("RGB")
    resized = rgb.resize(image.smart_resize(*rgb.size, spec), Image.Resampling.BICUBIC)
    return _patches(np.asarray(resized), spec)


def by_pillow_reduced(data: bytes, spec: ImageSpec) -> NDArray[np.uint8]:
    """The same with Pillow's own reduced scale: the smallest that is no smaller than the result."""
    with Image.open(io.BytesIO(data)) as opened:
        size = image.smart_resize(*opened.size, spec)
        opened.draft("RGB", size)
        rgb = opened.convert("RGB")
    return _patches(np.asarray(rgb.resize(size, Image.Resampling.BICUBIC)), spec)


def by_torch(data: bytes, spec: ImageSpec) -> NDArray[np.uint8]:
    """Our decoding, with torch's vectorised resizing of uint8."""
    pixels = torch.from_numpy(image.read_pixels(data, spec)).permute(2, 0, 1)[None, :3]
    width, height = image.smart_resize(pixels.shape[3], pixels.shape[2], spec)
    resized = torch.nn.functional.interpolate(pixels, size=(height, width), mode="bicubic", antialias=True)
    return _patches(resized[0].permute(1, 2, 0).numpy(), spec)


def by_headrace(data: bytes, spec: ImageSpec) -> NDArray[np.uint8]:
    """Ours."""
    return image.decode(data, spec)[0]


def _patches(pixels: NDArray[np.uint8], spec: ImageSpec) -> NDArray[np.uint8]:
    patch, merge = spec.patch, spec.merge
    rows, columns = pixels.shape[0] // (patch * merge), pixels.shape[1] // (patch * merge)
    cells = pixels.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(cells).reshape(-1, 3 * patch * patch)


CONTENDERS = {"Pillow": by_pillow, "torch": by_torch, "headrace": by_headrace}


def in_turns(names: Sequence[str], rounds: int) -> dict[str, float]:
    """The best rate of each, measured in new processes that take turns."""
    best = dict.fromkeys(names, 0.0)
    for _ in range(rounds):
        for name in names:
            progress(name)
            best[name] = max(best[name], _in_process(name))
    return best


def _in_process(name: str) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.preprocess.rates", name],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"measuring {name!r} failed:\n{done.stderr}")
    return float(done.stdout)


def _passes_per_s(work: Callable[[], object], clock: Callable[[], float] = process_time) -> float:
    """Of the fastest pass, after one that warms up."""
    seconds = []
    for _ in range(1 + PASSES):
        begin = clock()
        work()
        seconds.append(clock() - begin)
    return 1 / min(seconds[1:])


def _images(contender: str, files: Callable[[], list[bytes]], spec: ImageSpec) -> float:
    work, images = {**CONTENDERS, "Pillow, reduced": by_pillow_reduced}[contender], files()
    return len(images) * _passes_per_s(lambda: [work(data, spec).shape for data in images])


def _headers(read: Callable[[bytes, ImageSpec], object]) -> float:
    files = members(".jpg", ".png")
    return len(files) * _passes_per_s(lambda: [read(data, IMAGE) for data in files])


def _headers_of_shard() -> float:
    spec = _job_spec()
    with open_shard(list_shards(spec)[0].url, spec.sources[0]) as shard:
        records = [shard.read(row) for row in range(shard.num_rows)]
        files = [(record.load, member) for record in records for member in record.members if member.endswith("jpg")]
        return len(files) * _passes_per_s(lambda: [image.probe(load(member), IMAGE) for load, member in files])


def _real_time(files: Sequence[bytes]) -> float:
    headers = [audio.read_header(data, AUDIO) for data in files]
    seconds = sum(header.frames / header.sample_rate for header in headers)
    return seconds * _passes_per_s(lambda: [audio.decode(data, AUDIO).shape for data in files])


def _whole_samples(threads: int) -> float:
    """Records read, decoded and tokenised into Arrow batches, samples per second by the clock on the wall."""
    spec = _job_spec()
    job = JobWork("benchmark", spec)
    job.shards = tuple(list_shards(spec))
    rows = job.index(0)[0]
    refs = [SampleRef(sample_id=row, shard=0, row=row) for row in range(rows)]
    parts = 2 * [refs[begin : begin + PART_SAMPLES] for begin in range(0, rows, PART_SAMPLES)]
    with ThreadPoolExecutor(threads) as pool:
        rate = 2 * rows * _passes_per_s(lambda: [batch.num_rows for batch, _ in pool.map(job.decode_batch, parts)], perf_counter)
    job.close()
    return rate


def _job_spec() -> JobSpec:
    return parse_spec({"name": "benchmark", "sources": [{"path": str(EXAMPLE / "pictures-*.tar")}]})


RATES: dict[str, Callable[[], float]] = {
    **{f"{name}, 0.6 megapixels": functools.partial(_images, name, large_photos, IMAGE) for name in CONTENDERS},
    **{f"{name}, 0.6 to 0.4 megapixels": functools.partial(_images, name, large_photos, SMALLER) for name in CONTENDERS},
    **{f"{name}, 0.3 megapixels": functools.partial(_images, name, photos, IMAGE) for name in CONTENDERS},
    "Pillow, 12 megapixels": functools.partial(_images, "Pillow", camera_photos, IMAGE),
    "headrace, 12 megapixels": functools.partial(_images, "headrace", camera_photos, IMAGE),
    "Pillow, 12 megapixels, reduced": functools.partial(_images, "Pillow, reduced", camera_photos, IMAGE),
    "headrace, 12 megapixels, reduced": functools.partial(_images, "headrace", camera_photos, REDUCED),
    "headers": lambda: _headers(image.probe),
    "headers, Pillow": lambda: _headers(reference.read_header),
    "headers, shard": _headers_of_shard,
    "16,000 Hz, 10 s": lambda: _real_time([clip(10, 16_000, 1)]),
    "16,000 and 22,050 Hz, 1 to 5 s": lambda: _real_time(recordings()),
    "44,100 Hz stereo, 10 s": lambda: _real_time([clip(10, 44_100, 2)]),
    "samples, 1 thread": lambda: _whole_samples(1),
    "samples, 2 threads": lambda: _whole_samples(2),
}
"""By name: images/s, headers/s, seconds of sound per second, samples/s."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(RATES[sys.argv[1]]())
