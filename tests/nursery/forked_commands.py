"""`headrace` commands that are forks of a nursery, whose first one begins it."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.nursery.mother import ADDRESS
from tests.nursery.nursery import Forked, LentNursery, Nursery

HOOK = "TESTS_HOOK"
"""A variable of the environment: the file of a program to run before the command."""


class ForkedCommands:
    """They have the environment and the working directory that this process has when they are started."""

    def __init__(self, folder: Path, module: str = "tests.nursery.commands") -> None:
        """folder: for what they say. module: the nursery, which may have others than commands, too."""
        self._folder = folder
        self._module = module
        self._nursery: Nursery | None = None
        self._numbers = itertools.count()

    @property
    def nursery(self) -> Nursery:
        """Begun when it is first asked for; lent by the suite's mother where there is one."""
        if self._nursery is None:
            address = os.environ.get(ADDRESS)
            self._nursery = LentNursery(address) if address else Nursery(self._module, self._folder / "nursery.log")
        return self._nursery

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str], errors: Path | None = None) -> Forked:
        """Start one. environment: further variables. errors: for what it writes to stderr; None: `log`. Raises TimeoutError."""
        files = {"log": str(log.absolute()), "errors": str(errors.absolute()) if errors else "", "folder": str(Path.cwd())}
        pid = self.nursery.fork(arguments=[*arguments], environment={**os.environ, **environment}, **files)
        return Forked(self.nursery, pid)

    def run(self, *arguments: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
        """What becomes of one, and what it says. Raises TimeoutExpired; it is killed then."""
        number = next(self._numbers)
        out, errors = (self._folder / f"{number}.{name}" for name in ("out", "err"))
        command = self.start(arguments, out, {}, errors)
        try:
            code = command.wait(timeout_s)
        finally:
            command.kill()
        return subprocess.CompletedProcess(arguments, code, out.read_text(), errors.read_text())

    def close(self) -> None:
        """All end."""
        if self._nursery is not None:
            self._nursery.close()
