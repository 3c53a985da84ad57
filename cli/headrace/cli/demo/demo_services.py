"""The services of a demo, which share this machine's processors."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.demo.display import Display
from headrace.cli.run.processors import usable_processors
from headrace.local_services import LocalServices
from headrace.processes import ProcessGroup


def start_services(
    group: ProcessGroup, num_preprocessors: int, transport: str, out: Path, store: Path, display: Display
) -> LocalServices:
    """Start the reorder service and the preprocessors in `group`, with their logs in `out` and the state store in `store`.

    `display` shows what takes long, as the first start after an installation does, which compiles the planner. Raises
    HeadraceError where the reorder service does not start.
    """
    threads = max(1, usable_processors() // num_preprocessors)

    with display.waiting(lambda: _last_words(group)):
        services = LocalServices.start(
            group, preprocessors=num_preprocessors, logs=out, store=store, threads=threads, ucx=transport == "ucx", page=True
        )
    display.say(f"to watch it: {services.page_url} or headrace top --endpoint {services.endpoint}")
    return services


def _last_words(group: ProcessGroup) -> str:
    """Return what the process that was started last says that it does."""
    name, said = ("", "") if not group.processes else (group.processes[-1].name, "".join(group.processes[-1].last_lines(1)))
    return f"{name or 'services'}: {said.partition(' INFO ')[2] or said or 'starting'}"
