"""`headrace bench services`: what a job's services take of processor cores, where trainers share these with them.

The services run as they do beside trainers, each a process of its own. In place of trainers, loaders of this process take all
steps as fast as they come, and then none for a while. What a process takes of the cores in both times says what it takes for a
sample, and what it takes always.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.plan import LLM
from headrace.spec import JobSpec

if TYPE_CHECKING:
    from headrace.trainer import StepLoader

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PARENT, _TIMES = 1, slice(11, 15)
"""Fields of /proc/PID/stat behind the name: the parent, and the ticks of a process and of its children that have ended."""
SKIPPED_STEPS = 10
"""Steps in front of those that count: meanwhile processes load what they need, and preprocessors get ahead as far as they may."""
SETTLING_S, RESTING_S = 1.0, 3.0
"""Seconds after which it is looked whether services are at rest, and in which what they take at rest is measured."""
_BUSY_CORES, _MOST_SETTLING_S = 0.2, 60.0
"""Services that take more than so much of a core are taken to work ahead still; seconds for which that is awaited."""
_MOST_RANKS = 16
"""That are connected."""
LOADING = "loading in the trainers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesFigures:
    """Core seconds of the services of a job, by name of the process; what loading takes in trainers is one of them."""

    steps: int
    samples: int
    sample_s: Mapping[str, float]
    """For a sample."""
    resting_cores: Mapping[str, float]
    """In a second without a step."""

    @property
    def cluster_fields(self) -> dict[str, float]:
        """What all of them take, as the fields of a cluster file."""
        return {
            "service_s_per_sample": float(f"{sum(self.sample_s.values()):.3g}"),
            "service_cores": float(f"{sum(self.resting_cores.values()):.3g}"),
        }


def with_equal_trainers(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's fields with a replica for each stage of all replicas, so that as many loaders connect as trainers would.

    They are 16 at most. What a microbatch has in the mean stays, and how units are executed is left out.
    """
    topology = job.get("topology", {})
    replicas, count, stages = topology.get("replicas", 1), topology.get("microbatches", 1), topology.get("stages", {LLM: 1})
    places = min(replicas * sum(stages.values()), job["global_batch"], _MOST_RANKS)
    topology = {"replicas": places, "microbatches": max(1, count * replicas // places), "stages": stages}
    return {name: value for name, value in job.items() if name != "execution"} | {"topology": topology}


def measure(spec: JobSpec, steps: int, threads: int, say: Callable[[str], object] = lambda _: None) -> ServicesFigures:
    """Run the services of a job with one preprocessor of so many threads, and take so many steps of it, as a rank for each of its
    replicas.

    `say` is called with a text before what takes long. Raises HeadraceError for a service that does not start or a job that
    fails.
    """
    from headrace.trainer import local

    say("starting the services")
    with local(spec, threads=threads) as job, ExitStack() as stack:
        pids = dict(zip(("reorder service", "preprocessor"), job.pids, strict=True))
        ranks = spec.topology.replicas
        loaders = [stack.enter_context(job.connect(rank=rank, num_ranks=ranks)) for rank in range(ranks)]
        say(f"{SKIPPED_STEPS} steps that do not count, and {steps} that do")
        _take(loaders, SKIPPED_STEPS)
        began, began_s = _core_s(pids), time.monotonic()
        samples = _take(loaders, steps)
        took, took_s = _since(began, pids), time.monotonic() - began_s
        say("and none")
        _settle(pids, say)
        began = _core_s(pids)
        time.sleep(RESTING_S)
        resting = {name: seconds / RESTING_S for name, seconds in _since(began, pids).items()}
    return ServicesFigures(
        steps=steps,
        samples=samples,
        sample_s={name: max(0.0, seconds - resting[name] * took_s) / samples for name, seconds in took.items()},
        resting_cores=resting,
    )


def _take(loaders: Sequence[StepLoader], steps: int) -> int:
    """Take and commit so many steps with each of the loaders, all at the same time: the number of their samples."""

    def take(loader: StepLoader) -> int:
        samples = 0
        for step in itertools.islice(loader, steps):
            samples += sum(len(microbatch.data.sample_ids) for microbatch in step)
            loader.commit(step)
        return samples

    with ThreadPoolExecutor(len(loaders)) as threads:
        return sum(threads.map(take, loaders))


def _settle(pids: Mapping[str, int], say: Callable[[str], object]) -> None:
    """Wait until the services work ahead no more, a minute at most."""
    deadline_s = time.monotonic() + _MOST_SETTLING_S
    while time.monotonic() < deadline_s:
        began = sum(map(_of_tree, pids.values()))
        time.sleep(SETTLING_S)
        if sum(map(_of_tree, pids.values())) - began < _BUSY_CORES * SETTLING_S:
            return
    say("the services do not come to rest; what they take now counts as rest")


def _since(began: Mapping[str, float], pids: Mapping[str, int]) -> dict[str, float]:
    return {name: seconds - began[name] for name, seconds in _core_s(pids).items()}


def _core_s(pids: Mapping[str, int]) -> dict[str, float]:
    """Return the core seconds that each process has taken, with all that it started, and this process without its children."""
    return {name: _of_tree(pid) for name, pid in pids.items()} | {LOADING: time.process_time()}


def _of_tree(pid: int) -> float:
    found = _processes()
    children = [child for child, (parent, _) in found.items() if parent == pid]
    own_s = found[pid][1] if pid in found else 0.0
    return own_s + sum(map(_of_tree, children))


def _processes() -> dict[int, tuple[int, float]]:
    """Return the parent and the core seconds of every process of this machine."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                found[int(entry.name)] = int(fields[_PARENT]), _TICK_S * sum(map(int, fields[_TIMES]))
    return found
