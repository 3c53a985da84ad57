"""The log of connections that are turned away before anything is asked, in a bounded number of lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from headrace.observability.logs import pairs
from headrace.refusals import EVERY_S

log = logging.getLogger(__name__)


class ConnectionLog:
    """Writes a line for every connection that is turned away, but of each reason one a second at most: nobody can fill a log."""

    def __init__(self, reasons: Iterable[str], now_s: Callable[[], float] = time.monotonic) -> None:
        """`reasons`: those that are known. All others, of which there may be any number, share a line a second."""
        self._reasons = frozenset(reasons)
        self._now_s = now_s
        self._written_s: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def note(self, peer: str, reason: str) -> None:
        """Note a connection of a peer, named as `headrace.refusals` names them."""
        kind = reason if reason in self._reasons else ""
        now_s = self._now_s()
        if kind in self._written_s and now_s - self._written_s[kind] < EVERY_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._written_s[kind] = now_s
        left_out = self._left_out.pop(kind, 0)
        log.warning("refused a connection %s", pairs(peer=peer, reason=reason, **({"left_out": left_out} if left_out else {})))
