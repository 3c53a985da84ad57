"""Samples delivered to a trainer process, beside the bare decode loop and beside other loaders, in turns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.peers import DATALOADER, PEERS, RAY_DATA, Peer
from benchmarks.peers.environment import NotInstalledError, python_of, variables
from benchmarks.preprocess.meter import Reading
from benchmarks.preprocess.ray_actors import services_on_ray
from benchmarks.preprocess.services import LONGEST_S, Services, measure, next_line, services, trainer_command
from benchmarks.preprocess.workload import BATCH_SAMPLES, job_spec
from benchmarks.report import Rival, Row, Section, at_least, at_most
from benchmarks.timing import progress

BARE, OURS, ON_RAY = "the bare decode loop", "Headrace", "Headrace on Ray"
PREPROCESSORS = (("--threads", "1"), ("--threads", "1"))
"""Arguments of each: one a core, so that no two threads wait for the same interpreter."""
BARE_GOAL, PEER_GOAL, ON_RAY_GOAL, TRAINER_CPU_GOAL, WAIT_GOAL = 0.80, 1.2, 0.95, 0.05, 0.01
SKIP_SAMPLES = 480
"""Before every measurement: 30 batches, more than any contender has ready when it starts."""
LOAD = 0.6
"""Of the rate that was measured: what the emulated trainer asks for."""

Readings = Mapping[str, Sequence[Reading]]
Contender = Callable[[], Reading]


def sections(photos: Path, *, rounds: int, seconds: float) -> list[Section]:
    """Rates, CPU seconds, waits, on a folder of shards beside which there is room for other formats."""
    contenders: dict[str, Contender] = {BARE: partial(_bare, photos, seconds), OURS: partial(_ours, photos, seconds)}
    others = {peer.title: partial(_prepared, peer, photos, seconds) for peer in PEERS}
    others[ON_RAY] = partial(_prepared_on_ray, photos, seconds)
    absent = {}
    for title, prepared in others.items():
        try:
            contenders[title] = prepared()
        except (NotInstalledError, subprocess.SubprocessError) as err:
            absent[title] = str(err)
    readings: dict[str, list[Reading]] = {title: [] for title in contenders}
    for number in range(rounds):
        for title, contender in contenders.items():
            if title in absent:
                continue
            progress(f"delivery, round {number + 1} of {rounds}: {title}")
            try:
                readings[title].append(contender())
            except (RuntimeError, subprocess.SubprocessError) as err:
                if title in (BARE, OURS):
                    raise
                absent[title] = str(err)
                del readings[title]
    return [rates(readings, absent, rounds), _cpu(readings), _waits(photos, seconds, median(_each(readings[OURS], _rate)))]


def rates(readings: Readings, absent: Mapping[str, str], rounds: int) -> Section:
    """Rows of what each contender delivered; `absent`: why others were not measured, by their titles."""
    ours = median(_each(readings[OURS], _rate))
    rows = [
        Row(
            name=f"{OURS} over {BARE}",
            value=_ratio(readings, OURS, BARE),
            goal=at_least(BARE_GOAL),
            detail=f"rounds: {_list(_ratios(readings, OURS, BARE))}; other programs had {_taken(readings[OURS])} of the machine",
        )
    ]
    peers = [title for title in readings if title not in (BARE, OURS, ON_RAY)]
    if peers:
        best = max(peers, key=lambda title: median(_each(readings[title], _rate)))
        rows.append(
            Row(
                name=f"{OURS} over the best peer, {best}",
                value=_ratio(readings, OURS, best),
                goal=at_least(PEER_GOAL),
                detail=f"rounds: {_list(_ratios(readings, OURS, best))}",
            )
        )
    bare = median(_each(readings[BARE], _rate))
    for title in (BARE, *peers):
        rate = median(_each(readings[title], _rate))
        share = f"theirs is {rate / bare:.2f} of the bare loop; others had {_taken(readings[title])} of the machine"
        rows.append(Row(name=OURS, value=ours, unit="/s", rival=Rival(value=rate, source=title), detail=share))
    if ON_RAY in readings:
        rows += _on_ray_rows(readings)
    rows += [Row(name=f"{title}: not measured", value=0.0, detail=reason[-200:]) for title, reason in absent.items()]
    how = f"0.6-megapixel photographs, {BATCH_SAMPLES} a batch; two cores; medians of {rounds} rounds, ratios inside of a round"
    return Section(title=f"Delivered to a trainer process, every page read: {how}", rows=rows)


def _on_ray_rows(readings: Readings) -> list[Row]:
    plain = f"{OURS}, its preprocessors plain processes"
    detail = f"rounds: {_list(_ratios(readings, ON_RAY, OURS))}; others had {_taken(readings[ON_RAY])} of the machine"
    rate, plain_rate = (median(_each(readings[title], _rate)) for title in (ON_RAY, OURS))
    return [
        Row(
            name=f"{ON_RAY} over {plain}",
            value=_ratio(readings, ON_RAY, OURS),
            goal=at_least(ON_RAY_GOAL),
            detail=detail,
        ),
        Row(name=ON_RAY, value=rate, unit="/s", rival=Rival(value=plain_rate, source=plain)),
    ]


def _cpu(readings: Readings) -> Section:
    ours = readings[OURS]
    trainer, together = _ms(ours, _main), _ms(ours, _with_services)
    rows = []
    if DATALOADER in readings:
        theirs, their_main = _ms(readings[DATALOADER], _tree), _ms(readings[DATALOADER], _main)
        goal = at_most(TRAINER_CPU_GOAL * theirs)
        rows = [
            Row(
                name="trainer process, all threads",
                value=trainer,
                unit="ms",
                rival=Rival(value=theirs, source="DataLoader, main + workers"),
                goal=goal,
                detail=f"goal: {TRAINER_CPU_GOAL:.0%} of what runs on the trainer's host",
            ),
            Row(
                name="trainer process, all threads",
                value=trainer,
                unit="ms",
                rival=Rival(value=their_main, source="DataLoader, main process alone"),
            ),
        ]
    bare = Rival(value=_ms(readings[BARE], _tree), source=BARE)
    rows.append(Row(name="all processes of ours", value=together, unit="ms", rival=bare))
    reorder = median(1e3 * reading.watched_cpu_s[0] / reading.samples for reading in ours)
    rows.append(Row(name="of it the reorder service with its store", value=reorder, unit="ms"))
    rows.append(Row(name="of it preprocessing", value=together - trainer - reorder, unit="ms"))
    return Section(title="CPU time a sample, in the same runs", rows=rows)


def _waits(photos: Path, seconds: float, rate: float) -> Section:
    progress("delivery: a trainer that takes its time")
    reading = _ours(photos, seconds, "--rate", f"{LOAD * rate:.1f}")
    row = Row(
        name=f"wait for data, trainer that asks for {LOAD:.0%} of that rate",
        value=sum(reading.waits_s) / reading.seconds,
        unit="of the time",
        goal=at_most(WAIT_GOAL),
        detail=f"longest {1e3 * max(reading.waits_s):.1f} ms of {len(reading.waits_s)} steps, unpacking included",
    )
    return Section(title="Waiting; the model is EMULATED: the trainer sleeps as long as it would compute", rows=[row])


def _bare(photos: Path, seconds: float) -> Reading:
    """Both processes at once. Raises RuntimeError or SubprocessError where one fails or takes too long."""
    count = 2
    options = ["--skip", str(SKIP_SAMPLES // count), "--seconds", str(seconds)]
    command = [sys.executable, "-m", "benchmarks.preprocess.bare", str(photos)]
    processes = [
        subprocess.Popen([*command, str(number), str(count), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(count)
    ]
    try:
        for process in processes:
            next_line(process)
        for process in processes:
            process.stdin.write("go\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        readings = [Reading.parse(process.communicate(timeout=LONGEST_S)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Reading(
        samples=sum(reading.samples for reading in readings),
        seconds=sum(reading.seconds for reading in readings) / count,
        main_cpu_s=sum(reading.main_cpu_s for reading in readings),
        tree_cpu_s=sum(reading.tree_cpu_s for reading in readings),
        idle_s=[sum(cores) / count for cores in zip(*(reading.idle_s for reading in readings), strict=True)],
    )


def _ours(photos: Path, seconds: float, *extra: str) -> Reading:
    with services(PREPROCESSORS) as running:
        return _delivered(running, running.pids, photos, seconds, *extra)


def _on_ray(python: Path, photos: Path, seconds: float) -> Reading:
    with services_on_ray(python, photos) as on_ray:
        return _delivered(on_ray.services, on_ray.pids(), photos, seconds)


def _delivered(running: Services, pids: Sequence[int], photos: Path, seconds: float, *extra: str) -> Reading:
    job = running.submit(job_spec(photos))
    watch = [option for pid in pids for option in ("--watch", str(pid))]
    return measure(trainer_command(running.endpoint, job, skip=SKIP_SAMPLES, seconds=seconds, extra=[*watch, *extra]))


def _prepared_on_ray(photos: Path, seconds: float) -> Contender:
    """With Ray installed. Raises NotInstalledError."""
    return partial(_on_ray, python_of(RAY_DATA), photos, seconds)


def _prepared(peer: Peer, photos: Path, seconds: float) -> Contender:
    """Installed, with its data in its format. Raises NotInstalledError or SubprocessError."""
    command = [str(python_of(peer)), "-m", "benchmarks.peers.run", peer.module]
    folder = photos
    if peer.own_format:
        progress(f"peers: converting for {peer.title}")
        folder = photos.with_name(peer.module)
        convert = [*command, str(photos), "--convert", str(folder)]
        subprocess.run(convert, check=True, capture_output=True, timeout=LONGEST_S, env=variables())
    options = [str(folder), "--skip", str(SKIP_SAMPLES), "--seconds", str(seconds)]
    return partial(measure, [*command, *options], environment=variables())


def _rate(reading: Reading) -> float:
    return reading.rate


def _main(reading: Reading) -> float:
    return reading.main_cpu_s / reading.samples


def _tree(reading: Reading) -> float:
    return reading.tree_cpu_s / reading.samples


def _with_services(reading: Reading) -> float:
    return (reading.main_cpu_s + sum(reading.watched_cpu_s)) / reading.samples


def _each(readings: Sequence[Reading], figure: Callable[[Reading], float]) -> list[float]:
    return [figure(reading) for reading in readings]


def _ms(readings: Sequence[Reading], figure: Callable[[Reading], float]) -> float:
    """The median, in milliseconds."""
    return 1e3 * median(_each(readings, figure))


def _ratios(readings: Readings, one: str, other: str) -> list[float]:
    """The rate of one over that of another, round by round."""
    return [above.rate / below.rate for above, below in zip(readings[one], readings[other], strict=True)]


def _ratio(readings: Readings, one: str, other: str) -> float:
    return median(_ratios(readings, one, other))


def _taken(readings: Sequence[Reading]) -> str:
    return f"{median(reading.taken for reading in readings):.0%}"


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
