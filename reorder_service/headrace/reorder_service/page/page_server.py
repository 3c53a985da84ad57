"""The page's HTTP server: it takes requests, has them answered, and writes the answers. It only reads, and serves GET and HEAD.

It runs in the service's event loop, so that no figure is older than the state that it shows; all that takes long is done in a
thread (page_data), and once for all who ask (answers). It is aiohttp's server without its routes and middlewares, which would
take half of the time of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from aiohttp import web

from headrace.errors import EndpointError, HeadraceError, NotFoundError, UnavailableError, UserError
from headrace.identity import Identity
from headrace.observability.logs import pairs
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.page.answers import Answer, Answers
from headrace.reorder_service.page.page_admission import Caller, PageAdmission
from headrace.reorder_service.page.page_data import PageData
from headrace.reorder_service.page.page_tls import https_context
from headrace.reorder_service.page.static_files import static_answers
from headrace.rpc import check_endpoint
from headrace.token_folder import TokenFolder

log = logging.getLogger(__name__)

KEEPALIVE_S = 75.0  # a connection without requests is closed then: a hidden page asks every 15 s
MOST_QUERY = 200  # characters of a query that are looked at
STOP_S = 0.2  # for answers in progress when the server stops

_STATUS_OF: dict[type, int] = {NotFoundError: 404, UnavailableError: 409, UserError: 400}


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
    page = _Page(admission, PageData(leadership, endpoint))
    server = web.Server(page.handle, access_log=None, keepalive_timeout=KEEPALIVE_S)
    secure = https_context(options.identity) if options.identity is not None else None
    try:
        listening = await asyncio.get_running_loop().create_server(server, host.strip("[]"), int(port), ssl=secure)
    except OSError as err:
        page.close()
        raise EndpointError(
            f"cannot serve the page on {options.listen}: {err.strerror}; give --page another HOST:PORT, port 0 takes a free one"
        ) from err
    url = f"{'http' if secure is None else 'https'}://{host}:{listening.sockets[0].getsockname()[1]}/"
    log.info("page %s", pairs(url=url))
    try:
        yield url
    finally:
        listening.close()
        await server.shutdown(STOP_S)
        await page.answers.close()
        page.close()


class _Page:
    def __init__(self, admission: PageAdmission, data: PageData) -> None:
        self.answers = Answers()
        self._admission = admission
        self._data = data
        self._static, self._packed = static_answers(), static_answers(packed=True)

    def close(self) -> None:
        self._data.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = await self._answer(request)
        if answer.is_known_by(request.headers.get("If-None-Match")):
            kept = {name: value for name, value in answer.headers.items() if name != "Content-Type"}
            return web.Response(status=304, headers=kept)
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    async def _answer(self, request: web.BaseRequest) -> Answer:
        asked = request.raw_path
        if request.method not in ("GET", "HEAD"):
            sentence = f"the page is only read, by GET and HEAD, not by {request.method}: change jobs with `headrace job`"
            return Answer.of_error(405, sentence, {"Allow": "GET, HEAD"})
        path = asked.partition("?")[0]
        if not path.startswith("/api/"):
            files = self._packed if "gzip" in request.headers.get("Accept-Encoding", "") else self._static
            return files.get(path) or Answer.of_error(404, f"the page has no file {path[:100]!r}: open /")
        caller = Caller(address=_peer(request))
        authorization, host = request.headers.get("Authorization", ""), request.headers.get("Host", "")
        if (refused := self._admission.refusal(caller, path, authorization=authorization, host=host)) is not None:
            return refused
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
            "there is no such path: /api has service, jobs, jobs/NAME, and of a job NAME/steps, NAME/timeline and NAME/quarantine"
        )


def _status_of(error: HeadraceError) -> int:
    return next((_STATUS_OF[kind] for kind in type(error).__mro__ if kind in _STATUS_OF), 500)


def _peer(request: web.BaseRequest) -> str:
    """Return who sends a request, named as gRPC names peers."""
    found: Any = request.transport.get_extra_info("peername") if request.transport is not None else None
    if not found:
        return "unknown"
    return f"ipv6:[{found[0]}]:{found[1]}" if ":" in found[0] else f"ipv4:{found[0]}:{found[1]}"
