"""Answers of the page's server: each is made at most once in FRESH_S, whoever asks, and kept as the bytes that are sent."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import HeadraceError
from headrace.observability.logs import pairs
from headrace.reorder_service.jobs.stopping import stop_task

log = logging.getLogger(__name__)

FRESH_S = 1.0
MOST_ANSWERS = 128  # kept at a time; of more, the one that was made first is forgotten

JSON = "application/json"

_PIECE = 100  # entries of a list that are encoded at a time: no other thread has a turn meanwhile, for some tenths of a ms

# No other site's page can embed an answer or have it read as something else. A dozen headers would take a request's time again.
ANSWER_HEADERS = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": "headrace",
    "X-Content-Type-Options": "nosniff",
}
_NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, a body, and the headers that go with it."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, body: bytes, content_type: str, status: int = 200, more: Mapping[str, str] = _NO_HEADERS) -> Answer:
        """Return an answer that a client keeps and asks about with its ETag. `more`: further headers."""
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        return cls(status, body, {"Content-Type": content_type, "ETag": etag, **ANSWER_HEADERS, **more})

    @classmethod
    def of_value(cls, value: Any, status: int = 200, more: Mapping[str, str] = _NO_HEADERS) -> Answer:
        """Return an answer in JSON. Raises ValueError for a number that is infinite or none."""
        return cls.of(encoded(value).encode(), JSON, status, more)

    @classmethod
    def of_error(cls, status: int, error: object, more: Mapping[str, str] = _NO_HEADERS) -> Answer:
        """Return an answer with an error, a sentence that says what to do."""
        return cls.of_value({"error": str(error)}, status, more)

    def is_known_by(self, if_none_match: str | None) -> bool:
        """Whether a client that sends this If-None-Match has the answer already."""
        if if_none_match is None or self.status != 200:
            return False
        known = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
        return "*" in known or self.headers["ETag"] in known


def encoded(value: Any) -> str:
    """Return a value as JSON in ASCII, piece by piece, so that a thread which makes a long one does not hold up the others.

    Raises ValueError for a number that is infinite or none.
    """
    if isinstance(value, dict):
        return "{" + ",".join(f"{_dumps(key)}:{encoded(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        if len(value) > _PIECE:
            return "[" + ",".join(encoded(value[n : n + _PIECE])[1:-1] for n in range(0, len(value), _PIECE)) + "]"
        if any(isinstance(item, list | tuple) for entry in value[:1] if isinstance(entry, dict) for item in entry.values()):
            return "[" + ",".join(map(encoded, value)) + "]"
    return _dumps(value)


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


@dataclass(slots=True)
class _Held:
    made_s: float
    making: asyncio.Task[Answer]


class Answers:
    """The answers of late by what was asked. Those who ask while one is made wait for it."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._held: OrderedDict[str, _Held] = OrderedDict()

    async def get(self, asked: str, make: Callable[[], Awaitable[Answer]], status_of: Callable[[HeadraceError], int]) -> Answer:
        """Return the answer to `asked`: the one of less than FRESH_S ago, or what `make` returns.

        A HeadraceError of `make` becomes an answer with the status of `status_of`.
        """
        held = self._held.get(asked)
        if held is None or (held.making.done() and self._now_s() - held.made_s >= FRESH_S):
            self._held.pop(asked, None)
            if len(self._held) >= MOST_ANSWERS:
                self._held.popitem(last=False)
            held = _Held(self._now_s(), asyncio.create_task(_made(asked, make, status_of)))
            self._held[asked] = held
        if held.making.done():
            return held.making.result()
        return await asyncio.shield(held.making)  # others may wait for it as well

    async def close(self) -> None:
        """Make no more of what is being made."""
        for held in self._held.values():
            await stop_task(held.making)


async def _made(asked: str, make: Callable[[], Awaitable[Answer]], status_of: Callable[[HeadraceError], int]) -> Answer:
    try:
        return await make()
    except HeadraceError as err:
        return Answer.of_error(status_of(err), err)
    except Exception:  # one figure that cannot be told is no reason to tell nothing
        log.exception("page: no answer %s", pairs(path=asked))
        return Answer.of_error(500, "an internal error: see the reorder service's log")
