"""Who may ask the page's API: tokens with a role that may watch, so many calls a second, and no other site's scripts."""

from __future__ import annotations

import functools
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.call_rate import CallRate, host_of
from headrace.known_tokens import KnownTokens
from headrace.refusals import Reason, Refusals
from headrace.reorder_service.page.answers import Answer
from headrace.roles import Role, may_call, role_names
from headrace.token_folder import TokenFolder

_METHOD = "/headrace.v1.Jobs/Show"  # whoever may call it may watch
_SCHEME = "Bearer "
_MOST_PATH = 100  # characters of a path in the log


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sends a request, as `headrace.refusals` names peers."""

    address: str
    """Such as ipv4:10.0.0.7:51234."""

    def peer(self) -> str:
        return self.address

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class PageAdmission:
    """Refuses requests to the API, with a line in the log for each, but of each reason one a second at most."""

    def __init__(
        self,
        token: str,
        folder: TokenFolder | None,
        *,
        calls_per_s: float,
        any_host: bool,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`token`, `folder`, `calls_per_s`: as for `headrace.admission.Admission`. `any_host`: whether a browser may know this
        server by any name, also where no token is asked for."""
        self._own = KnownTokens.of([(token, Role.CLUSTER)] if token else [])
        self._folder = folder
        self._rate = CallRate(calls_per_s)
        self._any_host = any_host
        self._refusals = Refusals(now_s)
        self._now_s = now_s

    def refusal(self, caller: Caller, path: str, *, authorization: str, host: str) -> Answer | None:
        """Return the answer to a request that is refused; None where it is let in.

        `authorization`, `host`: its headers of these names, empty where there is none.
        """
        if not self._rate.take(host_of(caller.address), self._now_s()):
            sentence = (
                f"this service answers {self._rate.per_s:g} requests a second of one host, and yours makes more: wait a second, "
                "ask less often, or raise the service's --max-calls-per-s"
            )
            return self._refused(Reason.TOO_MANY_CALLS, caller, path, Answer.of_error(429, sentence, {"Retry-After": "1"}))
        if not (self._own or self._folder):
            return None if self._any_host or is_own_name(host) else self._foreign(caller, path, host)
        token = authorization.removeprefix(_SCHEME) if authorization.startswith(_SCHEME) else ""
        roles = self._own.roles_of(token) | (self._folder.tokens.roles_of(token) if self._folder else frozenset())
        if not roles:
            sentence = (
                f"this service asks for a token, and the request brought {'another one' if authorization else 'none'}: send "
                "`Authorization: Bearer TOKEN` with the cluster's token, or one of the role watch, submit or train"
            )
            reason = Reason.UNKNOWN_TOKEN if authorization else Reason.NO_TOKEN
            return self._refused(reason, caller, path, Answer.of_error(401, sentence, {"WWW-Authenticate": "Bearer"}))
        if not may_call(roles, _METHOD):
            has = role_names(roles)
            sentence = f"the page takes a token of the role watch, submit or train, and this one has {has}: take another token"
            return self._refused(Reason.ROLE, caller, path, Answer.of_error(403, sentence), has=has, takes=Role.WATCH.value)
        return None

    def _foreign(self, caller: Caller, path: str, host: str) -> Answer:
        sentence = (
            "this service asks for no token, and so answers browsers only that know it by its address or as localhost, since "
            f"another site's scripts could read its answers otherwise, and this request names {host[:_MOST_PATH]!r}: open the "
            "page by its address, or give the service a token"
        )
        return self._refused(Reason.FOREIGN_HOST, caller, path, Answer.of_error(403, sentence), host=host[:_MOST_PATH])

    def _refused(self, reason: Reason, caller: Caller, path: str, answer: Answer, **more: object) -> Answer:
        self._refusals.note(reason, f"GET {path[:_MOST_PATH]}", caller, **more)
        return answer


@functools.lru_cache(maxsize=64)
def is_own_name(host: str) -> bool:
    """Whether a request's Host is an address or localhost, which no site can take for its own name; so is none."""
    if not host:
        return True
    name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
    try:
        return name == "localhost" or bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False
