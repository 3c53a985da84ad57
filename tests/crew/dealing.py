"""Which file a member of a crew runs next. Knows nothing of processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TestFile:
    """Tests that one member runs, one after the other."""

    __test__ = False

    room: str
    """Files of one room need the same modules, servers and kernels."""
    tests: Sequence[int]
    """Their numbers among all that were collected."""
    load: float
    """How long it may take, in comparison with others."""


class Deck:
    """Files that nobody has taken yet.

    A member stays in a room while there is something left, as what it has loaded and started there serves the next file, too.
    Each room begins with its largest files, so that what comes last is short.
    """

    def __init__(self, files: Iterable[TestFile]) -> None:
        self._rooms: dict[str, deque[TestFile]] = {}
        self._begun: set[str] = set()
        for file in sorted(files, key=lambda file: -file.load):
            self._rooms.setdefault(file.room, deque()).append(file)

    def take(self, room: str) -> TestFile | None:
        """The next file of a room; of the room with the most left, of those that nobody is in if there are any, once it has none.

        room: "" for who is in none yet. None once all are taken.
        """
        if not self._rooms.get(room):
            left = {name: sum(file.load for file in files) for name, files in self._rooms.items() if files}
            if not left:
                return None
            room = max(left, key=lambda name: (name not in self._begun, left[name]))
        self._begun.add(room)
        return self._rooms[room].popleft()

    def put_back(self, file: TestFile) -> None:
        """What is left of one whose member has died: the next that its room has."""
        self._rooms.setdefault(file.room, deque()).appendleft(file)
