"""Samples that two preprocessors deliver as Ray actors, as plain processes, and Ray Data's own pipeline, in turns."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.peers import Peer
from benchmarks.peers.environment import variables
from benchmarks.preprocess.delivery import PREPROCESSORS, SKIP_SAMPLES
from benchmarks.preprocess.meter import Reading
from benchmarks.preprocess.services import Services, measure, services, trainer_command
from benchmarks.preprocess.workload import BATCH_SAMPLES, job_spec
from benchmarks.ray.killed import PREPROCESSOR
from benchmarks.report import Rival, Row, Section, at_least
from benchmarks.timing import progress
from tests.frameworks.ray_nodes import RayNodes, driving

GOAL = 0.95
ON_RAY, PLAIN = "Headrace on Ray", "plain processes"
Contender = Callable[[], Reading]


def section(python: Path, peer: Peer, photos: Path, *, rounds: int, seconds: float) -> Section:
    """All contenders have the same shards, decode with the same function, and have two threads for it."""
    ray_data = [str(python), "-m", "benchmarks.peers.run", peer.module, str(photos)]
    ray_data += ["--skip", str(SKIP_SAMPLES), "--seconds", str(seconds)]
    contenders: dict[str, Contender] = {
        PLAIN: partial(_plain, photos, seconds),
        ON_RAY: partial(_on_ray, python, photos, seconds),
        peer.title: partial(measure, ray_data, environment=variables()),
    }
    readings: dict[str, list[Reading]] = {title: [] for title in contenders}
    absent = ""
    for number in range(rounds):
        for title, contender in contenders.items():
            if title == peer.title and absent:
                continue
            progress(f"delivery, round {number + 1} of {rounds}: {title}")
            try:
                readings[title].append(contender())
            except (RuntimeError, subprocess.SubprocessError) as err:
                if title != peer.title:
                    raise
                absent = str(err)
    rates = {title: [reading.rate for reading in of_title] for title, of_title in readings.items()}
    ratios = [ours / theirs for ours, theirs in zip(rates[ON_RAY], rates[PLAIN], strict=True)]
    taken = median(reading.taken for of_title in readings.values() for reading in of_title)
    rows = [
        Row(
            name=f"{ON_RAY} over {PLAIN}",
            value=median(ratios),
            goal=at_least(GOAL),
            detail=f"rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; other programs had {taken:.0%} of the machine",
        ),
        Row(name=ON_RAY, value=median(rates[ON_RAY]), unit="/s", rival=Rival(value=median(rates[PLAIN]), source=PLAIN)),
    ]
    if absent or not rates[peer.title]:
        rows.append(Row(name=f"{peer.title}: not measured", value=0.0, detail=absent[-200:]))
    else:
        rival = Rival(value=median(rates[peer.title]), source=peer.title)
        rows.append(Row(name=ON_RAY, value=median(rates[ON_RAY]), unit="/s", rival=rival))
    how = f"0.6-megapixel photographs, {BATCH_SAMPLES} a batch; medians of {rounds} rounds; Ray's workers are not niced"
    return Section(title=f"Two preprocessors of one thread deliver to a trainer process, every page read: {how}", rows=rows)


def _plain(photos: Path, seconds: float) -> Reading:
    with services(PREPROCESSORS) as running:
        return _measured(running, photos, seconds, list(running.pids))


def _on_ray(python: Path, photos: Path, seconds: float) -> Reading:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name, services([]) as running:
        nodes = RayNodes(Path(name), python=python)
        try:
            for _ in range(2):
                nodes.add()
            doors = ("--allow-anyone", "--allow-plaintext")
            options = ("--min", "2", "--max", "2", *doors, "--data-root", str(photos), "--budget-mib", "512")
            with driving(nodes, running.endpoint, Path(name) / "driver.log", *options, python=python) as driver:
                driver.until(" started preprocessor=", count=2)
                return _measured(running, photos, seconds, [*running.pids, *nodes.pids(PREPROCESSOR)])
        finally:
            nodes.close()


def _measured(running: Services, photos: Path, seconds: float, pids: list[int]) -> Reading:
    job = running.submit(job_spec(photos))
    watch = [option for pid in pids for option in ("--watch", str(pid))]
    return measure(trainer_command(running.endpoint, job, skip=SKIP_SAMPLES, seconds=seconds, extra=watch))
