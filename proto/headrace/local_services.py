"""The reorder service and the preprocessors of one machine, each a child process: for the demo, a notebook or a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headrace.errors import HeadraceError
from headrace.processes import Process, ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServices:
    """The running services, which listen on the loopback address only."""

    endpoint: str
    """Address of the reorder service."""
    page_url: str = ""
    """Where a browser sees the web page; empty where there is none."""
    _reorder: Process
    _preprocessors: Sequence[Process]

    @classmethod
    def start(
        cls,
        group: ProcessGroup,
        *,
        preprocessors: int,
        logs: Path,
        store: Path,
        threads: int | None = None,
        ucx: bool = False,
        page: bool = False,
        say: Callable[[str], object] | None = None,
    ) -> Self:
        """Start the reorder service and the preprocessors in `group`.

        `logs`, `store`: folders for their logs and for the state store. `threads`: of each preprocessor; None: as many as
        processors may be used. `ucx`: whether they offer payload by UCX, too. `page`: whether there is a web page. `say`: told
        what takes long. Raises HeadraceError where the reorder service does not start.
        """
        arguments = ["reorder", "--listen", "127.0.0.1:0", "--store", f"embedded:{store}"]
        arguments += ["--page", "127.0.0.1:0"] * page
        reorder = group.add(Process("reorder service", arguments, logs / "reorder.log"))
        endpoint = reorder.endpoint(say)
        arguments = ["preprocessor", "--listen", "127.0.0.1:0", "--reorder", endpoint]
        arguments += ["--threads", str(threads)] * (threads is not None) + ["--ucx"] * ucx
        children = [
            group.add(Process(f"preprocessor {number}", arguments, logs / f"preprocessor-{number}.log"))
            for number in range(preprocessors)
        ]
        page_url = (reorder.said(" page url=") or "") if page else ""
        return cls(endpoint=endpoint, page_url=page_url, _reorder=reorder, _preprocessors=children)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the reorder service, and then of the preprocessors."""
        return tuple(process.pid for process in (self._reorder, *self._preprocessors))

    def await_preprocessors(self) -> None:
        """Wait until every preprocessor listens. Raises HeadraceError for one that does not start."""
        for process in self._preprocessors:
            process.endpoint()

    def look_after(self, say: Callable[[str], object]) -> None:
        """Restart preprocessors that have ended, and say so. Raises HeadraceError where the reorder service has ended, or a
        preprocessor ends again and again."""
        if self._reorder.exit_code() is not None:
            raise HeadraceError(f"the {self._reorder.end()}")
        for process in self._preprocessors:
            if process.exit_code() is not None:
                end = process.end()  # of this start, before the next one
                process.restart()
                say(f"{end}; it was started again")
