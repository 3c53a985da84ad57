"""Headrace's preprocessors as actors of a Ray cluster on this machine, for one measurement."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.preprocess.services import Services, services
from tests.frameworks.ray_nodes import PREPROCESSOR, Driver, RayNodes, driving

COUNT = 2
"""Preprocessors of one thread, on nodes of one processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRay:
    """Running services whose preprocessors are on Ray."""

    services: Services
    nodes: RayNodes
    driver: Driver

    def pids(self) -> list[int]:
        """The reorder service's, then those of the preprocessors that there are now."""
        return [*self.services.pids, *self.nodes.pids(PREPROCESSOR)]


@contextmanager
def services_on_ray(python: Path, photos: Path, *, spare_nodes: int = 0) -> Iterator[OnRay]:
    """A reorder service, and a cluster with preprocessors that the driver has started; Ray's workers are not niced.

    `python`: an interpreter that has Ray; `spare_nodes`: without a preprocessor. Raises RuntimeError where the cluster or the
    preprocessors do not start, or the driver does not end well.
    """
    options = ["--min", str(COUNT), "--max", str(COUNT), "--allow-anyone", "--allow-plaintext"]
    options += ["--data-root", str(photos), "--budget-mib", "512"]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, services([]) as running:
        logs = Path(folder)
        try:
            with RayNodes(logs, python=python) as nodes:
                for _ in range(COUNT + spare_nodes):
                    nodes.add()
                with driving(nodes, running.endpoint, logs / "driver.log", *options, python=python) as driver:
                    driver.until(" started preprocessor=", count=COUNT)
                    yield OnRay(services=running, nodes=nodes, driver=driver)
        except (AssertionError, TimeoutError) as err:
            raise RuntimeError(f"no preprocessors on Ray: {err}") from err
