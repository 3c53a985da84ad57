"""The page's HTTP server: it takes requests, has them answered, and writes the answers. It only reads, and serves GET and HEAD.

It runs in the service's event loop, so that no figure is older than the state that it shows; all that takes long is done in a
thread (page_data), and once for all who ask (answers) or watch (watched_views). It is aiohttp's server without its routes and
middlewares, which would take half of the time of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from aiohttp import web

from headrace.errors import EndpointError, HeadraceError, NotFoundError, UnavailableError, UserError
from headrace.identity import Identity
from headrace.observability.logs import pairs
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.page.answers import ANSWER_HEADERS, Answer, Answers
from headrace.reorder_service.page.page_admission import Caller, PageAdmission
from headrace.reorder_service.page.page_data import PageData
from headrace.reorder_service.page.page_door import Door
from headrace.reorder_service.page.page_tls import https_context
from headrace.reorder_service.page.static_files import static_answers
from headrace.reorder_service.page.watched_views import MOST_VIEWERS, Views, parts_of
from headrace.rpc import check_endpoint
from headrace.token_folder import TokenFolder

log = logging.getLogger(__name__)

WATCH = "/api/watch"
WATCH_S = 30.0  # a viewer asks again then: a token that was taken back is not let in any more
STALLED_S = 3.0  # for the end of what a viewer was told; one that does not read it is cut off
KEEPALIVE_S = 75.0  # a connection without requests is closed then
MOST_QUERY = 200  # characters of a query that are looked at
STOP_S = 0.2  # for answers in progress when the server stops

_STATUS_OF: dict[type, int] = {NotFoundError: 404, UnavailableError: 409, UserError: 400}
_WATCH_HEADERS = {
    **ANSWER_HEADERS,
    "Content-Type": "application/x-ndjson",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """Where the page is served, and who may see it."""

    listen: str
    """HOST:PORT; port 0 takes a free one."""
    token: str = ""
    tokens: TokenFolder | None = None
    identity: Identity | None = None
    """For HTTPS; None: plain HTTP."""
    calls_per_s: float = float("inf")
    any_host: bool = False
    """Whether the page may be known by any host name where no token is asked for."""


@contextlib.asynccontextmanager
async def page_served(options: PageOptions, leadership: Leadership, endpoint: str) -> AsyncIterator[str]:
    """Serve the page during the block, and yield its URL. `endpoint`: at which the service answers calls.

    Raises EndpointError if the address is malformed, taken or not of this machine.
    """
    host, _, port = check_endpoint(options.listen).rpartition(":")
    admission = PageAdmission(options.token, options.tokens, calls_per_s=options.calls_per_s, any_host=options.any_host)
    page = Page(admission, PageData(leadership, endpoint))
    server = web.Server(page.handle, access_log=None, keepalive_timeout=KEEPALIVE_S, handler_cancellation=True)
    door = Door(https_context(options.identity), server) if options.identity is not None else None
    try:
        listening = await asyncio.get_running_loop().create_server(door or server, host.strip("[]"), int(port))
    except OSError as err:
        page.close()
        raise EndpointError(
            f"cannot serve the page on {options.listen}: {err.strerror}; give --page another HOST:PORT, port 0 takes a free one"
        ) from err
    url = f"{'http' if door is None else 'https'}://{host}:{listening.sockets[0].getsockname()[1]}/"
    log.info("page %s", pairs(url=url))
    try:
        yield url
    finally:
        listening.close()
        if door is not None:
            await door.close()
        page.views.end()
        await server.shutdown(STOP_S)
        await page.answers.close()
        page.close()


class Figures(Protocol):
    """What the API tells, as `page_data.PageData` makes it: each method may raise a HeadraceError."""

    async def service(self) -> Answer: ...
    async def jobs(self) -> Answer: ...
    async def job(self, name: str, /) -> Answer: ...
    async def steps(self, name: str, query: Mapping[str, str], /) -> Answer: ...
    async def timeline(self, name: str, query: Mapping[str, str], /) -> Answer: ...
    async def quarantine(self, name: str, query: Mapping[str, str], /) -> Answer: ...
    def close(self) -> None: ...


class Page:
    """Answers the requests of one server."""

    def __init__(self, admission: PageAdmission, data: Figures) -> None:
        self.answers = Answers()
        self.views = Views(lambda path: self._asked(f"/api/{path}"))
        self._admission = admission
        self._data = data
        self._static, self._packed = static_answers(), static_answers(packed=True)

    def close(self) -> None:
        self._data.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the answer to a request; of one that watches, when it has ended."""
        path, _, query = request.raw_path.partition("?")
        if (refused := self._refusal(request, path)) is not None:
            return _reply(request, refused)
        if path == WATCH:
            return await self._watch(request, query)
        return _reply(request, await self._asked(request.raw_path) if path.startswith("/api/") else self._file(request, path))

    def _refusal(self, request: web.BaseRequest, path: str) -> Answer | None:
        if request.method not in ("GET", "HEAD"):
            sentence = f"the page is only read, by GET and HEAD, not by {request.method}: change jobs with `headrace job`"
            return Answer.of_error(405, sentence, {"Allow": "GET, HEAD"})
        if not path.startswith("/api/"):
            return None
        caller = Caller(address=_peer(request))
        authorization, host = request.headers.get("Authorization", ""), request.headers.get("Host", "")
        return self._admission.refusal(caller, path, authorization=authorization, host=host)

    def _file(self, request: web.BaseRequest, path: str) -> Answer:
        files = self._packed if "gzip" in request.headers.get("Accept-Encoding", "") else self._static
        return files.get(path) or Answer.of_error(404, f"the page has no file {path[:100]!r}: open /")

    async def _watch(self, request: web.BaseRequest, query: str) -> web.StreamResponse:
        """Tell a viewer what some paths below /api/ answer, and again whenever that changes, for WATCH_S."""
        try:
            asks = parts_of(query)
        except UserError as err:
            return _reply(request, Answer.of_error(400, err))
        if self.views.num_viewers >= MOST_VIEWERS:
            sentence = f"this service tells {MOST_VIEWERS} pages what changes, and no more: close one, and open this one again"
            return _reply(request, Answer.of_error(429, sentence, {"Retry-After": "15"}))
        if request.method == "HEAD":
            return web.Response(headers=_WATCH_HEADERS)
        response = web.StreamResponse(headers=_WATCH_HEADERS)
        async with self.views.watched(asks) as view:
            with contextlib.suppress(ConnectionError):  # it has gone away
                await response.prepare(request)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_S):
                        async for line in view.lines():
                            await response.write(line)
                await _end(request, response)
        return response

    async def _asked(self, asked: str) -> Answer:
        return await self.answers.get(asked, functools.partial(self._make, asked), _status_of)

    async def _make(self, asked: str) -> Answer:
        split = urlsplit(asked)
        query = dict(parse_qsl(split.query[:MOST_QUERY], keep_blank_values=True))
        match [unquote(part) for part in split.path.split("/")[2:]]:
            case ["service"]:
                return await self._data.service()
            case ["jobs"]:
                return await self._data.jobs()
            case ["jobs", name]:
                return await self._data.job(name)
            case ["jobs", name, ("steps" | "timeline" | "quarantine") as what]:
                make: Callable[[str, Mapping[str, str]], Awaitable[Answer]] = getattr(self._data, what)
                return await make(name, query)
        raise NotFoundError(
            "there is no such path: /api has service, jobs, jobs/NAME, of a job NAME/steps, NAME/timeline and NAME/quarantine, "
            "and watch?ask=PATH, which tells again what has changed of these"
        )


def _reply(request: web.BaseRequest, answer: Answer) -> web.Response:
    """Return an answer as it is sent; only that it has not changed to who has it already."""
    if answer.is_known_by(request.headers.get("If-None-Match")):
        kept = {name: value for name, value in answer.headers.items() if name != "Content-Type"}
        return web.Response(status=304, headers=kept)
    return web.Response(status=answer.status, body=answer.body, headers=answer.headers)


async def _end(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """End an answer; where the other side reads nothing, cut its connection off."""
    try:
        async with asyncio.timeout(STALLED_S):
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()


def _status_of(error: HeadraceError) -> int:
    return next((_STATUS_OF[kind] for kind in type(error).__mro__ if kind in _STATUS_OF), 500)


def _peer(request: web.BaseRequest) -> str:
    """Return who sends a request, named as gRPC names peers."""
    found: Any = request.transport.get_extra_info("peername") if request.transport is not None else None
    if not found:
        return "unknown"
    return f"ipv6:[{found[0]}]:{found[1]}" if ":" in found[0] else f"ipv4:{found[0]}:{found[1]}"
