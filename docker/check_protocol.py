"""What a test of several steps has checked: one printed line each, with its outcome, seconds and notes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


class CheckError(Exception):
    """Something did not come out as it has to. The message gives both sides."""


@dataclass(slots=True)
class Protocol:
    """What was checked, with its outcome and seconds."""

    failures: int = 0
    ledgers: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def check(self, what: str) -> Iterator[list[str]]:
        """Print one line about the block; notes put into the value stand behind it. Ends the test if the block raises."""
        notes: list[str] = []
        start = time.monotonic()
        try:
            yield notes
        except BaseException:
            self.failures += 1
            self._line("FAILED", what, start, notes)
            raise
        self._line("ok", what, start, notes)

    def _line(self, outcome: str, what: str, start: float, notes: list[str]) -> None:
        print(f"{outcome:<7} {what:<58} {time.monotonic() - start:6.1f} s  {'; '.join(notes)}", flush=True)


def expect(what: str, found: object, wanted: object) -> None:
    """Raise CheckError unless both are equal."""
    if found != wanted:
        raise CheckError(f"{what}: found {found}, wanted {wanted}")
