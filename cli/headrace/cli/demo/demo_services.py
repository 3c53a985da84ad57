"""The reorder service and the preprocessors of a demo, each in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headrace.cli.demo.display import Display
from headrace.cli.run.processes import Process, ProcessGroup
from headrace.cli.run.processors import usable_processors
from headrace.errors import HeadraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The running processes of a demo other than its trainers."""

    endpoint: str
    """Address of the reorder service."""
    _reorder: Process
    _preprocessors: list[Process]

    @classmethod
    def start(cls, group: ProcessGroup, num_preprocessors: int, transport: str, out: Path, store: str) -> Self:
        """Start the reorder service and the preprocessors in `group`, with their logs in `out`.

        `store` is the folder of the state store. Raises HeadraceError where the reorder service does not start.
        """
        arguments = ["reorder", "--listen", "127.0.0.1:0", "--store", f"embedded:{store}"]
        reorder = group.add(Process("reorder service", arguments, out / "reorder.log"))
        threads = max(1, usable_processors() // num_preprocessors)
        ucx = ["--ucx"] if transport == "ucx" else []
        arguments = ["preprocessor", "--listen", "127.0.0.1:0", "--threads", str(threads), *ucx]
        endpoint = reorder.endpoint()
        preprocessors = [
            group.add(Process(f"preprocessor {n}", [*arguments, "--reorder", endpoint], out / f"preprocessor-{n}.log"))
            for n in range(num_preprocessors)
        ]
        return cls(endpoint=endpoint, _reorder=reorder, _preprocessors=preprocessors)

    def look_after(self, display: Display) -> None:
        """Restart preprocessors that have ended. Raises HeadraceError where the reorder service has ended."""
        if self._reorder.exit_code() is not None:
            raise HeadraceError(f"the reorder service ended: {self._reorder.last_words()}")
        for process in self._preprocessors:
            code = process.exit_code()
            if code is not None:
                process.restart()
                display.say(f"{process.name} ended with {code}; started it again")
