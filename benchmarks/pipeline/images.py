"""Large samples: what a step costs the trainer's process with Headrace, and what it would cost to decode there.

The model is EMULATED: the trainer sleeps as long as it would compute, which is when the next sample comes.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from benchmarks.preprocess.inputs import photos
from benchmarks.preprocess.services import measure, services, trainer_command
from benchmarks.preprocess.workload import captions, job_spec, write_shards
from benchmarks.report import Rival, Row, Section, at_most
from benchmarks.timing import progress
from headrace.preprocessor import image
from headrace.spec import ImageSpec

IMAGES, SIDE = 10, 1024
SAMPLES, SHARDS = 64, 4
PREPROCESSORS = (("--threads", "1"), ("--threads", "1"))
RATE = 3.0
"""Samples per second that the trainer asks for: two preprocessors can decode several times as many."""
SKIP_STEPS, SECONDS, QUICK_SECONDS = 6, 8.0, 3.0
COST_GOAL_MS = 10.0
SPEC = ImageSpec(max_pixels=1036 * 1036)
"""Such an image becomes 74 x 74 patches of 14."""


def section(folder: Path, *, quick: bool) -> Section:
    """On shards in a folder that is made for them."""
    progress(f"{IMAGES} images of {SIDE} x {SIDE} a sample")
    jpegs = [_square(data) for data in photos()[:IMAGES]]
    _write(folder, jpegs)
    ours, codec = _decoding(jpegs, _decoded), image.codecs()["jpeg"]
    by_pillow = _decoding(jpegs, _decoded_by_pillow)
    document = {"global_batch": 1, "part_samples": 1, "topology": {"microbatches": 1}, "image": SPEC.model_dump()}
    with services(PREPROCESSORS) as running:
        job = running.submit(job_spec(folder, **document))
        seconds = QUICK_SECONDS if quick else SECONDS
        options = ["--rate", str(RATE)]
        reading = measure(trainer_command(running.endpoint, job, skip=SKIP_STEPS, seconds=seconds, extra=options))
    steps = f"of {len(reading.waits_s)} steps"
    rows = [
        Row(
            name="wait for a step, whose data came while the one before was computed",
            value=1e3 * median(reading.waits_s),
            unit="ms",
            rival=Rival(value=ours, source=f"decodes for itself, {codec}"),
            goal=at_most(COST_GOAL_MS),
            detail=f"median {steps}, worst {1e3 * max(reading.waits_s):.2f}",
        ),
        Row(
            name="CPU time of all threads of the process, every page read",
            value=1e3 * reading.main_cpu_s / reading.samples,
            unit="ms",
            rival=Rival(value=by_pillow, source="decodes for itself, Pillow"),
            goal=at_most(COST_GOAL_MS),
            detail=f"mean {steps}",
        ),
    ]
    megabytes = IMAGES * image.probe(jpegs[0], SPEC).patches * 3 * SPEC.patch**2 / 1e6
    sample = f"one sample of {IMAGES} JPEGs of {SIDE} x {SIDE}, {megabytes:.0f} MB of patches"
    what = f"{sample}; the model is EMULATED (DistTrain, figure 21)"
    return Section(title=f"What data cost the trainer in a step: {what}", rows=rows)


def _square(jpeg: bytes) -> bytes:
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(jpeg)) as photo:
        photo.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _write(folder: Path, jpegs: Sequence[bytes]) -> None:
    """Each sample has the same images in another order."""
    texts = captions()
    samples = (
        {"txt": texts[k % len(texts)]} | {f"{n}.jpg": jpegs[(n + k) % IMAGES] for n in range(IMAGES)} for k in range(SAMPLES)
    )
    write_shards(folder, samples, SAMPLES, SHARDS)


def _decoding(jpegs: Sequence[bytes], decode: Callable[[bytes], object]) -> float:
    """Milliseconds that one thread takes for the images of a sample, at best."""
    seconds = []
    for _ in range(4):  # the first one warms up
        began_s = time.perf_counter()
        for jpeg in jpegs:
            decode(jpeg)
        seconds.append(time.perf_counter() - began_s)
    return 1e3 * min(seconds)


def _decoded(jpeg: bytes) -> object:
    return image.decode(jpeg, SPEC)


def _decoded_by_pillow(jpeg: bytes) -> object:
    grid = image.probe(jpeg, SPEC)
    with Image.open(io.BytesIO(jpeg)) as photo:
        size = grid.width * SPEC.patch, grid.height * SPEC.patch
        pixels = np.asarray(photo.convert("RGB").resize(size, Image.Resampling.BICUBIC))
    return image.to_patches(pixels, SPEC)
