"""`headrace bench preprocess`: measures how fast this machine preprocesses a data set, stage by stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter, process_time

import numpy as np
import torch

from headrace.errors import DatasetError
from headrace.preprocessor import audio, image
from headrace.preprocessor.decoding import LoadedPart, LoadedSample, SizedSample
from headrace.preprocessor.job_work import JobWork
from headrace.preprocessor.payload.arena import open_arena
from headrace.preprocessor.payload.writer import PayloadWriter
from headrace.preprocessor.sources import list_shards
from headrace.quarantine import BadSampleError
from headrace.sample import SampleRef
from headrace.spec import JobSpec

PART_SAMPLES = 16
REPEAT_S = 1.0  # least time that a stage is repeated for: one pass over a small data set is too short to be timed
ARENA_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of preprocessing, with its average cost on one core."""

    name: str
    cpu_s_per_sample: float
    amount: float
    """How much the stage processes per sample, in `unit`."""
    unit: str

    @property
    def rate(self) -> float:
        """How much the stage processes per second of one core, in `unit`; 0 where no time was measured."""
        return self.amount / self.cpu_s_per_sample if self.cpu_s_per_sample else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessFigures:
    """The results of `headrace bench preprocess`."""

    num_samples: int
    num_refused: int
    stages: tuple[Stage, ...]
    """Stages in the order of the work, the rest at the end; together they cost about as much as the whole work."""
    samples_per_s: dict[int, float]
    """Samples fully preprocessed per second of wall time, by number of threads."""


def measure(spec: JobSpec, limit: int, threads: int, say: Callable[[str], object] = lambda _: None) -> PreprocessFigures:
    """Preprocess `limit` samples, the first ones of the sources in turn: stage by stage on one core, then whole on 1 and on
    `threads` threads.

    `say` is called with a text before each measurement. Raises DatasetError where there is no usable sample.
    """
    torch.set_num_threads(1)
    job = JobWork(spec.name, spec)
    job.shards = tuple(list_shards(spec))
    try:
        say("reading the shards")
        refs = list(itertools.islice(_refs(job), limit))
        parts = [refs[begin : begin + PART_SAMPLES] for begin in range(0, len(refs), PART_SAMPLES)]
        loaded = [job.load(part) for part in parts]
        sized = [_sized(job, item) for part in loaded for item in part.samples.values() if isinstance(item, LoadedSample)]
        good = [sample for sample in sized if sample is not None]
        if not good:
            paths = ", ".join(source.path for source in spec.sources)
            raise DatasetError(f"{paths} has no usable sample among the first {len(refs)}; `headrace inspect` says what is wrong")
        stages = list(_stages(job, parts, loaded, good, say))
        say("stages on one core: all of them")
        whole = _whole(job, parts, len(good))
        rest_s = max(0.0, whole.cpu_s_per_sample - sum(stage.cpu_s_per_sample for stage in stages))
        stages.append(Stage(name="the rest", cpu_s_per_sample=rest_s, amount=1.0, unit="samples"))
        rates = {}
        for number in sorted({1, threads}):
            say(f"whole samples, {number} thread{'s' if number > 1 else ''}")
            rates[number] = _rate(job, parts, number)
    finally:
        job.close()
    return PreprocessFigures(num_samples=len(good), num_refused=len(refs) - len(good), stages=tuple(stages), samples_per_s=rates)


def _refs(job: JobWork) -> Iterator[SampleRef]:
    """Yield a row of each source in turn, in the order of its shards, opening each shard when it is needed."""
    of_source: dict[int, list[int]] = {}
    for shard in range(len(job.shards)):
        of_source.setdefault(job.shards[shard].source, []).append(shard)
    for turn in itertools.zip_longest(*(_rows(job, shards) for shards in of_source.values())):
        yield from (ref for ref in turn if ref is not None)


def _rows(job: JobWork, shards: Sequence[int]) -> Iterator[SampleRef]:
    for shard in shards:
        for row in range(job.index(shard)[0]):
            yield SampleRef(sample_id=0, shard=shard, row=row)


def _sized(job: JobWork, loaded: LoadedSample) -> SizedSample | None:
    """Return a loaded sample with its sizes, or None if it is damaged."""
    try:
        return SizedSample(loaded=loaded, sizes=job.processor.size(loaded))
    except BadSampleError:
        return None


def _stages(
    job: JobWork,
    refs: Sequence[Sequence[SampleRef]],
    loaded: Sequence[LoadedPart],
    good: Sequence[SizedSample],
    say: Callable[[str], object],
) -> Iterator[Stage]:
    samples = len(good)
    images = [data for sample in good for data in sample.loaded.images]
    recordings = [data for sample in good for data in sample.loaded.recordings]
    tokens = sum(len(sample.sizes.sequence.input_ids) for sample in good)
    media_mb = sum(part.nbytes for part in loaded) / 1e6
    patches = sum(sample.sizes.num_patches for sample in good)
    seconds = sum(sample.sizes.num_frames for sample in good) / 100
    say("stages on one core: read")
    yield _stage("read", lambda: [job.load(part) for part in refs], samples, media_mb, "MB")
    say("stages on one core: headers and tokens")
    records = [item for part in loaded for item in part.samples.values() if isinstance(item, LoadedSample)]
    yield _stage("headers, tokens", lambda: [_sized(job, item) for item in records], samples, tokens, "tokens")
    if images:
        say("stages on one core: images")
        pixels = patches * job.spec.image.patch**2 / 1e6
        room = np.zeros((max(sample.sizes.num_patches for sample in good), 3 * job.spec.image.patch**2), np.uint8)

        def decode(data: bytes) -> None:
            image.decode(data, job.spec.image, room[: image.probe(data, job.spec.image).patches])

        yield _stage("images", lambda: _each(images, decode), samples, pixels, "megapixels")
    if recordings:
        say("stages on one core: sound")
        yield _stage(
            "sound", lambda: _each(recordings, lambda data: audio.decode(data, job.spec.audio)), samples, seconds, "s of sound"
        )


def _each(items: Sequence[bytes], decode: Callable[[bytes], object]) -> None:
    """Decode all items; damaged ones are included, since they take time too."""
    for item in items:
        try:
            decode(item)
        except BadSampleError:
            continue


def _whole(job: JobWork, refs: Sequence[Sequence[SampleRef]], samples: int) -> Stage:
    """Time all that a preprocessor does with a sample, up to writing it into shared memory if there is any."""
    arena = open_arena(ARENA_BYTES)
    writer = PayloadWriter(arena)

    def work() -> None:
        for part in refs:
            payload = job.decode(job.load(part), writer)
            if arena is not None and payload.slot is not None:
                arena.free(payload.slot)

    try:
        return _stage("whole", work, samples, 1.0 * samples, "samples")
    finally:
        if arena is not None:
            arena.close()


def _stage(name: str, work: Callable[[], object], samples: int, amount: float, unit: str) -> Stage:
    """Time `work`, which processes all samples, over at least REPEAT_S; `amount` is how much it processes, in `unit`."""
    work()
    begin, cpu, passes = perf_counter(), process_time(), 0
    while passes < 1 or perf_counter() - begin < REPEAT_S:
        work()
        passes += 1
    cpu = process_time() - cpu
    return Stage(name=name, cpu_s_per_sample=cpu / (passes * samples), amount=amount / samples, unit=unit)


def _rate(job: JobWork, parts: Sequence[Sequence[SampleRef]], threads: int) -> float:
    """Measure the samples per second on `threads` threads, from the shard to the Arrow batch."""
    with ThreadPoolExecutor(threads) as pool:
        begin, done = perf_counter(), 0
        while not done or perf_counter() - begin < 2 * REPEAT_S:
            done += sum(batch.num_rows for batch, _ in pool.map(job.decode_batch, parts))
        return done / (perf_counter() - begin)
