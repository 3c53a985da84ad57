"""Samples that come to a training loop of another library, from its own loader and from ours, in turns."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.peers import LOOPS
from benchmarks.peers.environment import NotInstalledError, python_of, variables
from benchmarks.preprocess.meter import Reading
from benchmarks.preprocess.services import measure, services
from benchmarks.preprocess.workload import BATCH_SAMPLES, job_spec
from benchmarks.report import Rival, Row, Section, at_least, at_most
from benchmarks.timing import progress

TITLES = {"huggingface": "Trainer of transformers", "accelerate": "loop with Accelerate", "lightning": "Trainer of Lightning"}
PREPROCESSORS = (("--threads", "1"), ("--threads", "1"))
"""Arguments of each: one a core, as the rival has two workers."""
SKIP_SAMPLES = 480
GOAL = 1.2
OWN, OURS = "own", "ours"

Readings = Mapping[tuple[str, str], Sequence[Reading]]


def sections(photos: Path, *, rounds: int, seconds: float) -> Iterator[Section]:
    """Rates and CPU time, of every library that can be installed."""
    title = (
        f"into the loop of a library, every page read by an EMULATED model: 0.6-megapixel photographs, {BATCH_SAMPLES} a batch, "
        f"two cores; medians of {rounds} rounds. Its own loader: a DataLoader with two workers over webdataset"
    )
    try:
        python = str(python_of(LOOPS))
    except NotInstalledError as err:
        yield Section(title=title, rows=[Row(name="the libraries are not installed", value=0, detail=str(err))])
        return
    readings: dict[tuple[str, str], list[Reading]] = {(library, feed): [] for library in TITLES for feed in (OWN, OURS)}
    absent = {}
    for number in range(rounds):
        for library, feed in list(readings):
            if library in absent:
                continue
            progress(f"loops, round {number + 1} of {rounds}: {library}, {feed}")
            try:
                readings[library, feed].append(_read(python, library, photos if feed == OWN else None, photos, seconds))
            except (RuntimeError, subprocess.SubprocessError) as err:
                if feed == OURS:
                    raise
                absent[library] = str(err)
                del readings[library, OWN], readings[library, OURS]
    rows = [row for library in TITLES if library not in absent for row in _rows(library, readings)]
    rows += [Row(name=f"{TITLES[library]}: not measured", value=0, detail=why[-300:]) for library, why in absent.items()]
    yield Section(title=title, rows=rows)


def _rows(library: str, readings: Readings) -> Iterator[Row]:
    ours, own = readings[library, OURS], readings[library, OWN]
    rates = [a.rate / b.rate for a, b in zip(ours, own, strict=True)]
    theirs = median(reading.rate for reading in own)
    yield Row(
        name=f"{TITLES[library]}: delivered",
        value=median(reading.rate for reading in ours),
        unit="samples/s",
        rival=Rival(value=theirs, source="its own loader"),
        goal=at_least(GOAL * theirs),
        detail=f"over its own, by round: {', '.join(f'{rate:.2f}' for rate in rates)}",
    )
    main = median(1e3 * reading.main_cpu_s / reading.samples for reading in own)
    yield Row(
        name=f"{TITLES[library]}: CPU time of the training process",
        value=median(1e3 * reading.main_cpu_s / reading.samples for reading in ours),
        unit="ms/sample",
        rival=Rival(value=main, source="its own loader, without its workers"),
        goal=at_most(main / GOAL),
        detail=f"with the workers {median(1e3 * reading.tree_cpu_s / reading.samples for reading in own):.2f} ms",
    )


def _read(python: str, library: str, folder: Path | None, photos: Path, seconds: float) -> Reading:
    command = [python, "-m", "benchmarks.loader.loops", library, "--skip", str(SKIP_SAMPLES), "--seconds", str(seconds)]
    environment = variables()
    if folder is not None:
        return measure([*command, "--folder", str(folder)], environment)
    with services(PREPROCESSORS) as running:
        job = running.submit(job_spec(photos))
        watch = [option for pid in running.pids for option in ("--watch", str(pid))]
        return measure([*command, "--endpoint", running.endpoint, "--job", job, *watch], environment)
