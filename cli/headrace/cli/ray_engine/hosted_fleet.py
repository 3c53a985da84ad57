"""Which actors of preprocessors are to be started and ended. Pure: what was heard of them in, what to do out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

SILENT_S = 10.0  # how long a question to an actor that has answered before may stay open: its node is lost, or hangs
EARLY_S = 10.0  # one that ends sooner could perhaps not start at all
LONGEST_PAUSE_S = 30.0  # between a preprocessor that has ended early and the next start
HOPELESS = 4  # ends soon after the start, in a row, none of which ever listened


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """An actor as the driver knows it."""

    number: int
    """Rises with every start."""
    started_s: float
    heard_s: float | None = None
    """When it last answered; None: not yet, for Ray may still look for a node."""
    asked_s: float | None = None
    """When the first question since then was asked; None: there is none. Time in which the driver asks nothing does not count."""
    node: str = ""
    endpoint: str = ""
    """Where its preprocessor listens; empty: not yet."""

    def asked(self, now_s: float) -> Self:
        """Return it with a question, which is open until `answered`."""
        return self if self.asked_s is not None else replace(self, asked_s=now_s)

    def answered(self, now_s: float, *, node: str, endpoint: str) -> Self:
        """Return it with an answer, after which no question is open."""
        return replace(self, heard_s=now_s, asked_s=None, node=node, endpoint=endpoint)

    def is_silent(self, now_s: float) -> bool:
        """Whether it counts as lost, since it does not answer any more."""
        return self.heard_s is not None and self.asked_s is not None and now_s - self.asked_s > SILENT_S


def surplus(fleet: Collection[Hosted], wanted: int) -> Sequence[Hosted]:
    """Return those to be ended where only so many are wanted: first those that do not listen yet, then of the node with the most
    of them, the latest first."""
    left, ended = list(fleet), []
    while len(left) > wanted:
        on_node = Counter(hosted.node for hosted in left)
        chosen = max(left, key=lambda hosted: (not hosted.endpoint, on_node[hosted.node], hosted.number))
        left.remove(chosen)
        ended.append(chosen)
    return ended


class Pauses:
    """How long to wait before the next start after preprocessors have ended early: 1, 2, 4 s and so on."""

    def __init__(self) -> None:
        self._early_ends = 0  # in a row
        self._until_s = float("-inf")

    def note_end(self, lived_s: float, now_s: float) -> None:
        """A preprocessor has ended by itself."""
        if lived_s >= EARLY_S:
            self.note_success()
            return
        self._early_ends += 1
        self._until_s = now_s + min(LONGEST_PAUSE_S, 2.0 ** (self._early_ends - 1))

    def note_success(self) -> None:
        """A preprocessor listens, or has lived for a while."""
        self._early_ends = 0

    def may_start(self, now_s: float) -> bool:
        return now_s >= self._until_s

    @property
    def is_hopeless(self) -> bool:
        """Whether no further start is likely to do better."""
        return self._early_ends >= HOPELESS
