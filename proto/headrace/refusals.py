"""The log of refused calls: who was refused what, and why, in a bounded number of lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from headrace.observability.logs import pairs

log = logging.getLogger(__name__)

EVERY_S = 1.0  # between two lines of the same reason
RELEASE = "headrace-release"
"""Key of the metadata in which a client says its release."""
MOST_RELEASE = 20  # characters of what a peer says of its release


class Reason(StrEnum):
    """Why a call is refused."""

    NO_TOKEN = "no token"
    UNKNOWN_TOKEN = "unknown token"
    ROLE = "role"
    PROTOCOL = "protocol"
    TOO_LARGE = "too large"
    NOT_WHOLE = "too large or cut off"
    MALFORMED = "malformed"
    TOO_MANY_CALLS = "too many calls"
    TOO_MANY_JOBS = "too many jobs"
    FOREIGN_HOST = "foreign host"
    FORGED_TICKET = "forged ticket"
    UNKNOWN_TICKET = "ticket of an unknown job"


class Refusals:
    """Writes a line for every refused call, but of each reason one a second at most: nobody can fill the log.

    The first of a reason is written at once. A line that follows others says how many were left out before it.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._written_s: dict[Reason, float] = {}
        self._left_out: dict[Reason, int] = {}

    def note(self, reason: Reason, method: str, context: Any, **more: object) -> None:
        """Note a refused call. `context`: the call's, which names the peer and its release. `more`: further fields."""
        now_s = self._now_s()
        if reason in self._written_s and now_s - self._written_s[reason] < EVERY_S:
            self._left_out[reason] = self._left_out.get(reason, 0) + 1
            return
        self._written_s[reason] = now_s
        said = dict(context.invocation_metadata() or ())
        fields: dict[str, object] = {"method": method, "peer": context.peer(), "reason": reason.value}
        fields |= {"release": str(said.get(RELEASE, ""))[:MOST_RELEASE] or "not said", **more}
        if left_out := self._left_out.pop(reason, 0):
            fields["left_out"] = left_out
        log.warning("refused a call %s", pairs(**fields))
