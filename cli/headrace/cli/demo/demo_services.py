"""The services of a demo, which share this machine's processors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.cli.run.processors import usable_processors
from headrace.local_services import LocalServices
from headrace.processes import ProcessGroup


def start_services(
    group: ProcessGroup, num_preprocessors: int, transport: str, out: Path, store: Path, say: Callable[[str], object]
) -> LocalServices:
    """Start the reorder service and the preprocessors in `group`, with their logs in `out` and the state store in `store`.

    `say` is told what takes long, as the first start after an installation does, which compiles the planner. Raises HeadraceError
    where the reorder service does not start.
    """
    threads = max(1, usable_processors() // num_preprocessors)
    return LocalServices.start(
        group, preprocessors=num_preprocessors, logs=out, store=store, threads=threads, ucx=transport == "ucx", say=say
    )
