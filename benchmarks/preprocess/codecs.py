"""`python -m benchmarks.preprocess.codecs`: how fast a core turns files into what a model takes, beside plain Pillow."""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.preprocess.inputs import camera_mosaics, camera_photos, large_photos, members
from benchmarks.preprocess.rates import CONTENDERS, IMAGE, REDUCED, by_headrace, by_pillow, in_turns
from benchmarks.report import RESULTS, Report, Rival, Row, Section, at_least, at_most
from headrace.preprocessor import image
from headrace.preprocessor.audio import flac

IMAGE_GOAL_RATIO, DIFFERENCE_GOAL, PROBE_GOAL_PER_S, AUDIO_GOAL = 2.3, 5, 20_000, 700
ROUNDS = 2


def main() -> None:
    """Measure, print, write. The verdict is in the table: a goal that is missed is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preprocess.codecs", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where preprocess_codecs.json goes")
    options = parser.parse_args()
    report = Report(
        benchmark="preprocess_codecs",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=sections(quick=options.quick),
    )
    report.write(options.results / "preprocess_codecs.json")
    report.show()


def sections(*, quick: bool) -> list[Section]:
    """The codecs' part of the preprocessing benchmark."""
    rounds = 1 if quick else ROUNDS
    return [_images(rounds), _camera(rounds), _differences(), _headers(rounds), _sound(rounds), _threads(rounds)]


def _images(rounds: int) -> Section:
    rows = []
    for size in ("0.6 megapixels", "0.6 to 0.4 megapixels", "0.3 megapixels"):
        rates = in_turns([f"{name}, {size}" for name in CONTENDERS], rounds)
        pillow = Rival(value=rates[f"Pillow, {size}"], source="Pillow")
        goal = at_least(IMAGE_GOAL_RATIO * pillow.value)
        of_ours = f"goal: {IMAGE_GOAL_RATIO:g} x Pillow"
        rows += [
            Row(name=size, value=rates[f"headrace, {size}"], unit="/s", rival=pillow, goal=goal, detail=of_ours),
            Row(name=f"{size}, resized by torch", value=rates[f"torch, {size}"], unit="/s", rival=pillow),
        ]
    codec = image.codecs()["jpeg"]
    return Section(title=f"Photographs: {codec}, bicubic with antialiasing, uint8 patches; one core", rows=rows)


def _camera(rounds: int) -> Section:
    names = ("12 megapixels", "12 megapixels, reduced")
    rates = in_turns([f"{name}, {size}" for name in ("Pillow", "headrace") for size in names], rounds)
    rows = []
    for size, source in zip(names, ("Pillow", "Pillow with draft()"), strict=True):
        pillow = Rival(value=rates[f"Pillow, {size}"], source=source)
        rows.append(
            Row(name=f"{size} scale" if "reduced" in size else size, value=rates[f"headrace, {size}"], unit="/s", rival=pillow)
        )
    return Section(title="Photographs of 12 megapixels to 1; one core", rows=rows)


def _differences() -> Section:
    files = [*large_photos(), *members(".png", ".jpg")]
    pillow = [by_pillow(data, IMAGE).astype(np.int16) for data in files]
    worst = {
        name: max(int(np.abs(decode(data, IMAGE) - expected).max()) for data, expected in zip(files, pillow, strict=True))
        for name, decode in CONTENDERS.items()
    }
    rows = [
        Row(name="ours", value=worst["headrace"], goal=at_most(DIFFERENCE_GOAL)),
        Row(name="ours, resized by torch", value=worst["torch"]),
        Row(name="ours at reduced scale, 12 megapixels", value=_reduced(camera_photos()), detail="enlarged photographs"),
        Row(name="ours at reduced scale, sharp to the pixel", value=_reduced(camera_mosaics()), detail="a mosaic of photographs"),
    ]
    return Section(title=f"Largest difference from Pillow's patches, of 255; {len(files)} photographs and charts", rows=rows)


def _reduced(files: list[bytes]) -> int:
    """Largest difference of `reduced_scale` from the full size."""
    pairs = [(by_headrace(data, REDUCED), by_headrace(data, IMAGE)) for data in files]
    return max(int(np.abs(reduced.astype(np.int16) - full).max()) for reduced, full in pairs)


def _headers(rounds: int) -> Section:
    rates = in_turns(["headers", "headers, Pillow", "headers, shard"], rounds)
    goal = at_least(PROBE_GOAL_PER_S)
    pillow = Rival(value=rates["headers, Pillow"], source="Pillow")
    rows = [
        Row(name="JPEG and PNG in memory", value=rates["headers"], unit="/s", rival=pillow, goal=goal),
        Row(name="JPEG, whole files read from a local shard", value=rates["headers, shard"], unit="/s", goal=goal),
    ]
    return Section(title="Image headers to patch grids; one core", rows=rows)


def _sound(rounds: int) -> Section:
    names = ("16,000 Hz, 10 s", "16,000 and 22,050 Hz, 1 to 5 s", "44,100 Hz stereo, 10 s")
    rates = in_turns(names, rounds)
    rows = [Row(name=name, value=rates[name], unit="x real time", goal=at_least(AUDIO_GOAL)) for name in names]
    codec = flac.NAME or "libsndfile"
    return Section(title=f"FLAC to log-mel, 128 bins of 16 kHz: {codec}; one core", rows=rows)


def _threads(rounds: int) -> Section:
    """By the wall's clock, so other programs show: no goal."""
    rates = in_turns(["samples, 1 thread", "samples, 2 threads"], rounds)
    one = Rival(value=rates["samples, 1 thread"], source="one thread")
    row = Row(name="two threads", value=rates["samples, 2 threads"], unit="/s", rival=one, detail=f"on {os.cpu_count()} cores")
    return Section(title="Whole samples: read, decoded, tokenised, in Arrow batches; by the clock on the wall", rows=[row])


if __name__ == "__main__":
    main()
