"""The page's own server in front of recorded answers of a reorder service; it can fall silent or ask for a token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from headrace.errors import NotFoundError, UnavailableError
from headrace.reorder_service.page.answers import Answer
from headrace.reorder_service.page.page_admission import PageAdmission
from headrace.reorder_service.page.page_server import Page

ROOT = Path(__file__).parents[2]
STATES = ROOT / "tests" / "data" / "page"
PATIENCE_S = 60.0


@dataclass
class Service:
    """What the server answers. A test may change it while it runs."""

    documents: dict[str, Any] = field(default_factory=dict)
    """By path without its query, what the service answers."""
    silent: bool = False
    """Whether it breaks off what it was asked, and what it is asked."""
    asked: list[str] = field(default_factory=list)
    """The path of each request below /api/, in the order in which they came."""
    url: str = ""
    page: Page | None = None

    @property
    def job(self) -> dict[str, Any]:
        """The first job's document."""
        return next(body for path, body in self.documents.items() if path.count("/") == 2)

    @property
    def num_viewers(self) -> int:
        """How many pages are told what changes."""
        assert self.page is not None, "the server runs"
        return self.page.views.num_viewers


def state(name: str) -> dict[str, Any]:
    """The recorded answers of a state."""
    found: dict[str, Any] = json.loads((STATES / f"{name}.json").read_text(encoding="utf-8"))
    return found


class _Recorded:
    """The documents of a service as the figures of a page."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def service(self) -> Answer:
        return self._answer("api/service")

    async def jobs(self) -> Answer:
        return self._answer("api/jobs")

    async def job(self, name: str) -> Answer:
        return self._answer(f"api/jobs/{name}")

    async def steps(self, name: str, _query: Mapping[str, str]) -> Answer:
        return self._answer(f"api/jobs/{name}/steps")

    async def timeline(self, name: str, _query: Mapping[str, str]) -> Answer:
        return self._answer(f"api/jobs/{name}/timeline")

    async def quarantine(self, name: str, _query: Mapping[str, str]) -> Answer:
        return self._answer(f"api/jobs/{name}/quarantine")

    def close(self) -> None:
        pass

    def _answer(self, path: str) -> Answer:
        if path in self._service.documents:
            return Answer.of_value(self._service.documents[path])
        if path.count("/") < 2:
            raise UnavailableError("this service stands by: /api/service says who leads")
        raise NotFoundError(f"no job is called {path.split('/')[2]}: `headrace job list` has their names")


@contextlib.contextmanager
def canned_service(name: str = "running", *, token: str = "") -> Iterator[Service]:
    """A server in a state, during the block, in an event loop and a thread of its own. `token`: the only one that is let in."""
    service = Service(documents=state(name))
    started = threading.Event()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(_serve(service, token, started, ended),))
    thread.start()
    try:
        assert started.wait(PATIENCE_S), "the server has not started"
        yield service
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


async def _serve(service: Service, token: str, started: threading.Event, ended: asyncio.Event) -> None:
    page = service.page = Page(PageAdmission(token, None, calls_per_s=float("inf"), any_host=False), _Recorded(service))

    told = set[asyncio.Transport]()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        connection = request.transport
        if connection is None or not request.path.startswith("/api/"):
            return await page.handle(request)
        service.asked.append(request.path_qs)
        if service.silent:
            connection.abort()
            return web.Response()
        told.add(connection)
        try:
            return await page.handle(request)
        finally:
            told.discard(connection)

    server = web.Server(handle, access_log=None, handler_cancellation=True)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    service.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    started.set()
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.05)
        for connection in told if service.silent else ():
            connection.abort()
    listening.close()
    page.views.end()
    await server.shutdown(0.2)
    await page.answers.close()
