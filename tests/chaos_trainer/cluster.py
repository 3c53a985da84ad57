"""A standing cluster without trainers, and a nursery that forks nodes for one case after the other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from headrace import rpc
from headrace.cli.example import example_data
from headrace.reorder_service.store.embedded_redis import server_binary
from headrace.spec import JobSpec, parse_spec
from tests.chaos.processes import Standing
from tests.chaos.standing_cluster import COUNT, START_TIMEOUT_S, WHOLE_TIMEOUT_S, StandingCluster
from tests.nursery.nursery import Forked, Nursery
from tests.wire import free_ports

NURSERY = "tests.chaos_trainer.node_nursery"
"""Of nodes and of all commands."""
BUDGET_MIB = 64
VALIDATION = "charts-00001.tar"
"""Of the bundled example: what jobs evaluate that are to."""


def job_spec(name: str, steps: int, microbatches: int) -> JobSpec:
    """The bundled example in steps of eight samples, with cheap images. microbatches: half of those of a step."""
    return parse_spec(
        {
            "name": name,
            "sources": [{"path": str(example_data()), "name": "data"}],
            "validation": {"held-out": {"sources": [{"path": str(example_data() / VALIDATION)}]}},
            "steps": steps,
            "global_batch": 8,
            "part_samples": 2,
            "topology": {"replicas": 2, "microbatches": microbatches, "stages": {"encoder": 1, "llm": 1}},
            "image": {"max_pixels": 56 * 56},
        }
    )


class ForkedService(Standing):
    """A reorder service or preprocessor that is a fork of a nursery."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, nursery: Nursery) -> None:
        self._nursery = nursery
        super().__init__(name, [*arguments], log)

    def _launch(self, log: IO[bytes]) -> Forked:
        order = {"arguments": self._command, "log": str(self.log), "folder": str(Path.cwd()), "environment": dict(os.environ)}
        return Forked(self._nursery, self._nursery.fork(**order))


class Cluster(StandingCluster):
    """A Redis, reorder services and preprocessors, which are forks of a nursery, as nodes are."""

    nursery: Nursery

    def __init__(self, keep: Path | None = None, nursery: Nursery | None = None) -> None:
        """keep: for the logs; None: they are removed. nursery: of NURSERY, which outlives this; None: one of its own."""
        super().__init__(keep)
        self._lent = nursery

    def _start(self) -> None:
        self.nursery = self._lent or Nursery(NURSERY, self.folder / "nursery.log")
        redis_port, *ports = free_ports(1 + COUNT)
        settings = ["--port", str(redis_port), "--dir", str(self.folder), "--save", ""]
        redis = self._standing("redis", [server_binary(), *settings], ready="Ready to accept")
        self.await_(redis.is_ready, START_TIMEOUT_S, "Redis has to start")
        self._endpoints = [f"127.0.0.1:{port}" for port in ports]
        self.endpoint = ",".join(self._endpoints)
        for number, endpoint in enumerate(self._endpoints):
            store = f"redis://127.0.0.1:{redis_port}/0"
            self.reorders.append(self._headrace(f"reorder-{number}", "reorder", "--listen", endpoint, "--store", store))
            self.await_(self.is_led, START_TIMEOUT_S, "a reorder service has to lead")
        for number in range(COUNT):
            arguments = ["--reorder", self.endpoint, "--listen", "127.0.0.1:0", "--threads", "1", "--budget-mib", str(BUDGET_MIB)]
            self.preprocessors.append(self._headrace(f"preprocessor-{number}", "preprocessor", *arguments))

    def _headrace(self, name: str, *arguments: str) -> Standing:
        self.processes.append(ForkedService(name, arguments, self.folder / f"{name}.log", self.nursery))
        return self.processes[-1]

    def _end(self) -> None:
        if self._lent is None and hasattr(self, "nursery"):
            self.nursery.close()
        super()._end()

    def leader(self) -> Standing:
        """The reorder service that leads."""
        self.await_(self.is_led, WHOLE_TIMEOUT_S, "a reorder service has to lead")
        leads = [rpc.is_serving(endpoint, "headrace.v1.Jobs", timeout_s=1.0) for endpoint in self._endpoints]
        return self.reorders[leads.index(True)]

    def make_whole(self) -> None:
        """Start again who was killed. Raises TimeoutError."""
        for process in self.processes:
            process.start()
        self.await_(lambda: all(process.is_ready() for process in self.processes), WHOLE_TIMEOUT_S, "all have to run again")
        self.await_(self.is_led, WHOLE_TIMEOUT_S, "a reorder service has to lead")


def shared_memory() -> set[str]:
    """Names of all that lies there."""
    return set(os.listdir("/dev/shm"))
