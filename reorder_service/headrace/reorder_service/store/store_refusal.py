"""Why a Redis server cannot be used as the store: a sentence with its remedy, from what the client raised."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    NoPermissionError,
    RedisError,
)

RIGHTS = "~headrace:* -@all +@read +@write +@connection +eval +evalsha +script|load -@dangerous -@admin -@blocking +config|get"
"""What a user of Redis needs, as ACL SETUSER takes it; docker/users.acl gives it no more."""


def store_refusal(url: str, err: RedisError) -> str:
    """Return why the store at `url` cannot be used, and what to do. `url`: without its password."""
    causes = tuple(_chain(err))
    if isinstance(err, AuthenticationError | AuthenticationWrongNumberOfArgsError | AuthorizationError):
        return (
            f"the Redis server at {url} refuses the user or the password ({_words(err)}): write them into --store or "
            "HEADRACE_STORE as redis://USER:PASSWORD@HOST:PORT/DB, with %25, %40 and %2F for the %, @ and / of a password"
        )
    if isinstance(err, NoPermissionError):
        return f"the Redis server at {url} forbids its user what a store needs ({_words(err)}): give the user {RIGHTS}"
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return (
            f"the certificate of the Redis server at {url} is not trusted ({_words(err)}): name the file of its authority by "
            "?ssl_ca_certs=FILE at the end of the URL, and the host as the certificate does"
        )
    if url.startswith("rediss://") and any(isinstance(cause, FileNotFoundError | PermissionError) for cause in causes):
        return f"a file that {url} names cannot be read ({_words(err)}): correct ssl_ca_certs, ssl_certfile or ssl_keyfile"
    return f"no Redis server answers at {url}: {_words(err)}; see that one runs there and {_speech(url)}, or name another store"


def _speech(url: str) -> str:
    """What a server has to speak for a client of `url`: one that asks for a certificate may just hang up on who has none."""
    if not url.startswith("rediss://"):
        return "needs no TLS, for which rediss:// stands"
    if "ssl_certfile=" in url:
        return "speaks TLS, as rediss:// asks it to"
    return "speaks TLS and asks for no certificate, which ?ssl_certfile=FILE&ssl_keyfile=FILE at the end of the URL would name"


def _words(err: RedisError) -> str:
    return " ".join(str(err).split()).rstrip(".")


def _chain(err: BaseException | None) -> Iterator[BaseException]:
    while err is not None:
        yield err
        err = err.__cause__ or err.__context__
