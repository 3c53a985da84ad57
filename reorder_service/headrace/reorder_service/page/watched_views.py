"""Views that are watched: parts of the API that are looked at once a second, whoever watches, and told again when they change.

A viewer costs a write of bytes that are there already, where one that asks again costs a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeAlias
from urllib.parse import parse_qsl

from headrace.errors import UserError
from headrace.reorder_service.jobs.stopping import stop_task
from headrace.reorder_service.page.answers import FRESH_S, Answer

ALIVE_S = 3.0  # so often viewers are told something, an empty line where nothing has changed: it shows that they are connected
MOST_VIEWERS = 500
MOST_PARTS, MOST_PATH = 4, 400  # of a view, and characters of a part's path

Ask: TypeAlias = Callable[[str], Awaitable[Answer]]
"""Answers a path below /api/; it raises nothing."""


def parts_of(query: str) -> tuple[str, ...]:
    """Return the paths that a query `ask=PATH&ask=PATH` names, each once.

    Raises UserError for none, too many or too long ones.
    """
    named = parse_qsl(query, keep_blank_values=True)
    asks = tuple(dict.fromkeys(path for name, path in named if name == "ask"))
    if not 1 <= len(asks) <= MOST_PARTS or max(map(len, asks)) > MOST_PATH:
        raise UserError(
            f"/api/watch takes one to {MOST_PARTS} paths below /api/ of {MOST_PATH} characters at most, such as "
            f"?ask=service&ask=jobs, got {len(asks)}"
        )
    return asks


class View:
    """Some paths of the API that are looked at together, from the moment it is made until it is closed."""

    def __init__(self, asks: tuple[str, ...], ask: Ask) -> None:
        self.num_viewers = 0
        self._parts: Mapping[str, Answer] = {}
        self._told = asyncio.Event()
        self._over = False
        self._looking = asyncio.create_task(self._look(asks, ask), name="page view")

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield what a new viewer is told: a line with every part, and then one with those that have changed, whenever some have.

        It ends when the view does.
        """
        known: Mapping[str, str] = {}
        while not self._over:
            parts, told = self._parts, self._told
            if parts:
                yield _line({path: part for path, part in parts.items() if known.get(path) != _tag(part)})
                known = {path: _tag(part) for path, part in parts.items()}
            await told.wait()

    def end(self) -> None:
        """Have viewers told nothing more."""
        self._over = True
        self._told.set()

    async def close(self) -> None:
        """Look no more."""
        await stop_task(self._looking)

    async def _look(self, asks: tuple[str, ...], ask: Ask) -> None:
        told_s, known = time.monotonic(), dict[str, str]()
        while True:
            parts = {path: await ask(path) for path in asks}
            tags = {path: _tag(part) for path, part in parts.items()}
            if tags != known or time.monotonic() - told_s >= ALIVE_S:
                self._parts, known, told_s = parts, tags, time.monotonic()
                told, self._told = self._told, asyncio.Event()
                told.set()
            await asyncio.sleep(FRESH_S)  # from the end of a look: its answers are stale by the next one


class Views:
    """The views that somebody watches now; those of the same parts share one."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._views: dict[tuple[str, ...], View] = {}

    @property
    def num_viewers(self) -> int:
        """How many watch at present."""
        return sum(view.num_viewers for view in list(self._views.values()))

    @contextlib.asynccontextmanager
    async def watched(self, asks: tuple[str, ...]) -> AsyncIterator[View]:
        """Have one viewer more during the block, of these paths below /api/."""
        view = self._views.get(asks)
        if view is None:
            view = self._views[asks] = View(asks, self._ask)
        view.num_viewers += 1
        try:
            yield view
        finally:
            view.num_viewers -= 1
            if not view.num_viewers:
                del self._views[asks]
                await view.close()

    def end(self) -> None:
        """Have all viewers told nothing more: the service stops."""
        for view in self._views.values():
            view.end()


def _tag(part: Answer) -> str:
    return part.headers["ETag"]


def _line(parts: Mapping[str, Answer]) -> bytes:
    """Return parts as a line of JSON, {path: {"status", "body"}}; an empty line where there are none."""
    if not parts:
        return b"\n"
    told = (b'%b:{"status":%d,"body":%b}' % (json.dumps(path).encode(), part.status, part.body) for path, part in parts.items())
    return b"{%b}\n" % b",".join(told)
