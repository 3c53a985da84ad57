"""The first batch of remote data sets of 1,000 shards, with EMULATED latency: how long it takes, and what is fetched for it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.peers import DATALOADER, PEERS
from benchmarks.peers.environment import NotInstalledError, python_of
from benchmarks.preprocess.remote_shards import ROW_GROUP, sample_bytes, write_mds, write_parquet, write_tars
from benchmarks.preprocess.services import LONGEST_S, next_line, services
from benchmarks.preprocess.workload import GLOBAL_BATCH, job_spec, touch
from benchmarks.report import Goal, Rival, Row, Section, at_most
from benchmarks.timing import progress
from headrace import trainer

NUM_SHARDS = 1_000
LATENCY_S = 0.05
FIRST_GOAL_S, BYTES_GOAL = 3.0, 3.0
PREPROCESSORS = 2
LONG_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Set:
    title: str
    rows: int
    """Of a shard."""
    write: Callable[[Path, int], None]
    suffix: str
    shuffle_rows: int = 1


SETS = (
    _Set(title="MDS", rows=320, write=write_mds, suffix="mds"),
    _Set(title="tar", rows=100, write=write_tars, suffix="tar"),
    _Set(title=f"Parquet, {ROW_GROUP} rows a group", rows=320, write=write_parquet, suffix="parquet"),
    _Set(
        title=f"Parquet, {ROW_GROUP} rows a group, shuffle_rows: {ROW_GROUP}",
        rows=320,
        write=write_parquet,
        suffix="parquet",
        shuffle_rows=ROW_GROUP,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _First:
    """The first batch of a set: when it came, and what was asked of the server by then."""

    seconds: float
    fetched_bytes: int
    requests: int

    @property
    def bytes_ratio(self) -> float:
        """Bytes fetched over those of the samples of the batch."""
        return self.fetched_bytes / (GLOBAL_BATCH * sample_bytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    url: str

    def counts(self) -> Mapping[str, int]:
        """Requests and bytes since this was last asked."""
        with urllib.request.urlopen(f"{self.url}/counts", timeout=LONGEST_S) as answer:
            found: dict[str, int] = json.load(answer)
        return found


def sections(folder: Path, *, rounds: int) -> list[Section]:
    """Write few shards of each format into `folder`, serve each set as NUM_SHARDS, and have the first batches come from cold."""
    for one in SETS:
        if not (folder / one.suffix).exists():
            progress(f"remote: writing {one.title}")
            one.write(folder / one.suffix, one.rows)
    firsts: dict[str, list[_First]] = {one.title: [] for one in SETS}
    longer: dict[str, list[_First]] = {one.title: [] for one in SETS}
    peers: list[_First] = []
    refusal = ""
    with _serving(folder) as site:
        for turn in range(rounds):
            for one in SETS:
                progress(f"remote, round {turn + 1} of {rounds}: {one.title}")
                firsts[one.title].append(_ours(site, folder / "cache", one, steps=1))
                longer[one.title].append(_ours(site, folder / "cache", one, steps=LONG_STEPS))
            progress(f"remote, round {turn + 1} of {rounds}: {DATALOADER}")
            try:
                peers.append(_peer(site))
            except NotInstalledError as err:
                refusal = str(err)
    return [_section(one, firsts[one.title], longer[one.title], peers if one.suffix == "tar" else [], refusal) for one in SETS]


def _section(one: _Set, ours: list[_First], longer: list[_First], peers: list[_First], refusal: str) -> Section:
    megabytes = one.rows * sample_bytes() / 1e6
    source = f"{DATALOADER}, one shard after the other" if peers else ""
    rows = [
        _row("first batch, from submission", "s", ours, lambda first: first.seconds, at_most(FIRST_GOAL_S), peers, source),
        _row("bytes fetched, over the samples'", "", ours, lambda first: first.bytes_ratio, at_most(BYTES_GOAL), peers, source),
        _row("requests", "", ours, lambda first: first.requests, None, peers, source),
        _row(f"first batch of {LONG_STEPS}, from submission", "s", longer, lambda first: first.seconds, None, [], ""),
    ]
    if refusal and one.suffix == "tar":
        rows.append(Row(name=DATALOADER, value=0, detail=f"not installed: {refusal}"))
    title = (
        f"EMULATED latency of {LATENCY_S * 1e3:.0f} ms a request: {NUM_SHARDS:,} remote shards, {one.title}, of {one.rows} "
        f"samples and {megabytes:.0f} MB; one batch of {GLOBAL_BATCH}, from an empty cache; medians"
    )
    return Section(title=title, rows=rows)


def _row(
    name: str,
    unit: str,
    ours: list[_First],
    figure: Callable[[_First], float],
    goal: Goal | None,
    peers: list[_First],
    source: str,
) -> Row:
    rival = Rival(value=median(map(figure, peers)), source=source) if peers else None
    rounds = ", ".join(f"{figure(first):.3g}" for first in ours)
    return Row(name=name, value=median(map(figure, ours)), unit=unit, goal=goal, rival=rival, detail=f"rounds: {rounds}")


@contextmanager
def _serving(folder: Path) -> Iterator[_Site]:
    arguments = [str(folder), "--shards", str(NUM_SHARDS), "--latency-s", str(LATENCY_S)]
    command = [sys.executable, "-m", "benchmarks.preprocess.latency_site", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _Site(url=f"http://127.0.0.1:{next_line(process).strip()}")
        finally:
            process.terminate()


def _ours(site: _Site, cache: Path, one: _Set, *, steps: int) -> _First:
    folder = cache / f"{one.suffix}-{time.monotonic_ns()}"
    arguments = ("--threads", "1", "--allow-url", f"{site.url}/", "--allow-local-urls", "--cache", str(folder))
    with services([arguments] * PREPROCESSORS) as running:
        site.counts()
        begun_s = time.perf_counter()
        order = {"epochs": None, "steps": steps, "shuffle_rows": one.shuffle_rows}
        job = running.submit(job_spec(f"{site.url}/{one.suffix}/", **order))  # type: ignore[arg-type]
        with trainer.connect(running.endpoint, job=job) as loader:
            step = next(iter(loader))
            num_samples = 0
            for microbatch in step:
                touch(microbatch.data.patches)
                num_samples += len(microbatch.data.sample_ids)
            seconds = time.perf_counter() - begun_s
        assert num_samples == GLOBAL_BATCH
        counts = site.counts()
    return _First(seconds=seconds, fetched_bytes=counts["bytes"], requests=counts["requests"])


def _peer(site: _Site) -> _First:
    """The same batch from a loader that is started before, and begins where it is told to. Raises NotInstalledError."""
    peer = next(peer for peer in PEERS if peer.title == DATALOADER)
    urls = f"{site.url}/tar/shard-{{00000..{NUM_SHARDS - 1:05d}}}.tar"
    command = [str(python_of(peer)), "-m", "benchmarks.peers.first_batch", urls]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            next_line(process)
            site.counts()
            assert process.stdin is not None
            process.stdin.write("begin\n")
            process.stdin.flush()
            seconds = float(next_line(process))
            counts = site.counts()
        finally:
            process.kill()
    return _First(seconds=seconds, fetched_bytes=counts["bytes"], requests=counts["requests"])
