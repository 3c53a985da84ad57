"""Jobs that processes of their own train, and when the reorder service committed each step.

An epoch is one step, so that every step has the same samples: one is like the other, and what a loss adds to a step is not what
that one's samples take beyond those of others.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import yaml

from headrace.cli.example import example_data
from headrace.errors import HeadraceError
from headrace.jobs_client import JobsClient
from headrace.processes import Process, ProcessGroup, torchrun_environments
from headrace.spec import parse_spec

NUM_NODES = 6
REPLICAS = 2  # pipelines, which the same number of nodes may make or torchrun's ranks
GLOBAL_BATCH, NUM_MICROBATCHES = 24, 12
PATIENCE_S = 120.0
_FIRST = 3  # sample of an epoch
T = TypeVar("T")
_POLL_S = 0.01
_JSON = {"HEADRACE_LOG_FORMAT": "json"}  # with milliseconds and fields
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""For trainers, ours and those of torchft: the connections of a process that is killed end when its memory is given back, page by
page. On two busy cores this took 0.26 s with 0.6 GB of small pages, and 0.07 s with transparent huge ones."""
_KEEP_BYTES = str(1 << 32)
_KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": _KEEP_BYTES, "MALLOC_MMAP_THRESHOLD_": _KEEP_BYTES, **HUGE_PAGES}
"""For trainers: what is freed is kept, as on an accelerator. Else some of them spend a tenth of a step on page faults."""


@dataclass
class Log:
    """What a process says, as far as it was read. `time_s` of an event is on the clock of `time.time`."""

    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0

    def read(self) -> list[dict[str, Any]]:
        """All events so far."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n"):
                self._offset += len(line)
                if line.startswith(b"{"):
                    event = json.loads(line)
                    self.events.append(event | {"time_s": datetime.fromisoformat(event["time"]).timestamp()})
        return self.events


def write_epoch(path: Path) -> Path:
    """As many samples of the bundled example as a global batch has, evenly from all of its shards.

    They are as long as the mean global batch of the whole example, within a few percent: 6429 tokens and 1032 patches at the size
    below, for 6613 and 1036.
    """
    samples: dict[str, list[tuple[tarfile.TarInfo, bytes]]] = {}
    for shard in sorted(example_data().glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None, f"{shard} has files only"
                samples.setdefault(member.name.partition(".")[0], []).append((member, file.read()))
    chosen = list(samples.values())[_FIRST :: len(samples) // GLOBAL_BATCH][:GLOBAL_BATCH]
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for member, content in chain.from_iterable(chosen):
            archive.addfile(member, io.BytesIO(content))
    return path


class Services:
    """A reorder service with its embedded store, and two preprocessors."""

    def __init__(self, group: ProcessGroup, folder: Path) -> None:
        self.group, self.folder = group, folder
        arguments = ["reorder", "--listen", "127.0.0.1:0", "--store", f"embedded:{folder / 'store'}"]
        service = group.add(Process("reorder service", arguments, folder / "training-reorder.log", _JSON))
        self.endpoint = service.endpoint()
        self._data = write_epoch(folder / "epoch.tar")
        self._log = Log(service.log)
        for number in range(2):
            arguments = ["preprocessor", "--listen", "127.0.0.1:0", "--endpoint", self.endpoint, "--threads", "1"]
            group.add(Process("preprocessor", arguments, folder / f"training-preprocessor-{number}.log"))

    def submit(self, name: str, stages: int) -> str:
        """A job that does not end, planned for REPLICAS pipelines of an encoder and so many stages of the LLM."""
        topology = {"replicas": REPLICAS, "microbatches": NUM_MICROBATCHES // REPLICAS, "stages": {"encoder": 1, "llm": stages}}
        document = {
            "name": name,
            "sources": [{"path": str(self._data)}],
            "epochs": 1_000_000,
            "global_batch": GLOBAL_BATCH,
            "image": {"max_pixels": 112 * 112},
            "topology": topology,
            "strategy": "disttrain",  # by which no sample changes its replica
        }
        with self.client() as client:
            return client.submit(parse_spec(document))

    def client(self) -> JobsClient:
        return JobsClient(self.endpoint)

    def cancel(self, job: str) -> None:
        """Nothing is decoded for it any more."""
        with self.client() as client:
            client.cancel(job)

    def said(self, event: str, job: str, since_s: float = 0.0) -> list[dict[str, Any]]:
        """What the reorder service has said of the job since some time: `committed`, `recovered`, `pipelines`."""
        return [e for e in self._log.read() if e["event"] == event and e["job"] == job and e["time_s"] >= since_s]

    def await_commits(self, job: str, count: int, since_s: float) -> list[float]:
        """Times of so many commits after some time."""
        self.wait(lambda: len(self.said("committed", job, since_s)) >= count)
        return [event["time_s"] for event in self.said("committed", job, since_s)][:count]

    def wait(self, what: Callable[[], T | None], patience_s: float = PATIENCE_S) -> T:
        """What is true in the end. Raises HeadraceError."""
        deadline = time.monotonic() + patience_s
        while not (found := what()):
            if time.monotonic() > deadline:
                said = "".join(f"\n  {process.name}: {process.last_words()}" for process in self.group.processes)
                raise HeadraceError(f"nothing came of it within {patience_s:g} s; the last that each process said:{said}")
            time.sleep(_POLL_S)
        return found

    def start_nodes(self, job: str, count: int) -> list[Process]:
        """`headrace train --nodes` of so many nodes, one of which may be lost at a time."""
        (self.folder / f"{job}-nodes.yaml").write_text(
            yaml.safe_dump({"nodes": count, "max_failures": 1, "units": {"encoder": {}, "llm": {}}})
        )
        options = ["--nodes", str(self.folder / f"{job}-nodes.yaml")]
        return [self._start_trainer(job, number, {}, *options, "--node", f"node{number}") for number in range(count)]

    def start_ranks(self, job: str, stages: int, *options: str) -> list[Process]:
        """`headrace train --topology` of the pipelines that the job is planned for, as torchrun starts them."""
        units = {"encoder": {"dp": REPLICAS}, "llm": {"dp": REPLICAS, "pp": stages}}
        (self.folder / f"{job}-topology.yaml").write_text(yaml.safe_dump({"units": units}))
        options = ("--topology", str(self.folder / f"{job}-topology.yaml"), *options)
        environments = torchrun_environments(REPLICAS * (1 + stages))
        return [self._start_trainer(job, rank, environment, *options) for rank, environment in enumerate(environments)]

    def _start_trainer(self, job: str, number: int, environment: dict[str, str], *options: str) -> Process:
        arguments = ["train", "--endpoint", self.endpoint, "--job", job, "--threads", "1", *options]
        log = self.folder / f"{job}-trainer-{number}.log"
        return self.group.add(Process(f"trainer {number}", arguments, log, environment | _JSON | _KEEPS_MEMORY))


def kill(processes: Iterable[Process]) -> None:
    """One after the other, and none is asked."""
    for process in processes:
        process.wait(0.0)
