"""Why TLS keeps a client and a server apart: gRPC tells neither of them enough for a sentence."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from headrace.errors import EndpointError, HeadraceError, UnavailableError
from headrace.identity import AUTHORITIES, CHAIN, REORDER, TLS, Identity, Papers, identity

PROBE_TIMEOUT_S = 2.0
_HAS_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED


def tls_mismatch(endpoint: str, own: Identity | None, server: str) -> str:
    """Return why TLS keeps a client from talking to the server at `endpoint`; empty if TLS is not the reason.

    `endpoint`: HOST:PORT, or several separated by commas, of which the first with a reason counts. `own`: the client's;
    None: it speaks plain text. `server`: the name of the server asked for. Connects to find out, with a timeout of
    PROBE_TIMEOUT_S.
    """
    papers = own.present() if own is not None else None
    reasons = (_mismatch(one, papers, server) for one in endpoint.split(","))
    return next(filter(None, reasons), "")


async def explained(error: HeadraceError | None, reorder: str) -> HeadraceError | None:
    """Return an error that says why TLS keeps the process of this environment from the reorder service, else `error`.

    That is looked for only after an UnavailableError of a process that speaks TLS.
    """
    if not isinstance(error, UnavailableError) or (own := identity()) is None:
        return error
    reason = await asyncio.to_thread(tls_mismatch, reorder, own, REORDER)
    return EndpointError(reason) if reason else error


def shown_names(endpoint: str, own: Identity) -> list[str]:
    """Return the DNS names in the certificate of the server at HOST:PORT; none if it shows none that `own` accepts."""
    try:
        with _connected(endpoint, own.present(), "") as secured:
            return _names(secured)
    except OSError:  # which ssl.SSLError is
        return []


def shown_until(endpoint: str, own: Identity) -> datetime | None:
    """Return when the certificate of the server at HOST:PORT runs out, in UTC; None if it shows none that `own` accepts."""
    try:
        with _connected(endpoint, own.present(), "") as secured:
            shown: Any = secured.getpeercert() or {}
    except OSError:  # which ssl.SSLError is
        return None
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(shown["notAfter"]), UTC) if "notAfter" in shown else None


def _mismatch(endpoint: str, papers: Papers | None, server: str) -> str:
    try:
        with _connected(endpoint, papers, server) as secured:
            if secured.version() is None:  # no handshake: the connection was reset before it began
                return ""
            if papers is None:
                return (
                    f"{endpoint} speaks TLS only: name the folder with this process's papers by --tls DIR, {TLS} or tls= "
                    "(`headrace certs` makes them)"
                )
            return _wrong_name(endpoint, secured, server) or _refusal(endpoint, secured, papers)
    except ssl.SSLCertVerificationError as err:
        assert papers is not None
        if err.verify_code == _HAS_EXPIRED:
            return f"the certificate of {endpoint} has expired: renew the papers in the folder that its --tls names"
        return (
            f"the certificate of {endpoint} is of no authority in {papers.folder / AUTHORITIES} ({err.verify_message}): give "
            "both sides papers of the same authority"
        )
    except ssl.SSLEOFError:
        return ""
    except ssl.SSLError:
        if papers is None:
            return ""
        return f"{endpoint} speaks no TLS: start it with --tls DIR, or leave --tls, {TLS} and tls= away here"
    except OSError:
        return ""


@contextlib.contextmanager
def _connected(endpoint: str, papers: Papers | None, server: str) -> Iterator[ssl.SSLSocket]:
    """Connect with a handshake for the block. Raises OSError, of which ssl.SSLError is one."""
    host, _, port = endpoint.rpartition(":")
    context = _context(papers)
    with (
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S) as connection,
        context.wrap_socket(connection, server_hostname=server or None) as secured,
    ):
        yield secured


def _context(papers: Papers | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # names are compared here, for a sentence of our own
    context.set_alpn_protocols(["h2"])
    if papers is None:
        context.verify_mode = ssl.CERT_NONE  # only to learn whether the server speaks TLS; nothing is sent over it
    else:
        context.load_verify_locations(cadata=papers.authorities.decode("ascii"))
        with open(os.memfd_create("papers"), "wb") as file:  # ssl reads files, and theirs may be replaced by now
            file.write(papers.chain + b"\n" + papers.key)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def _wrong_name(endpoint: str, secured: ssl.SSLSocket, server: str) -> str:
    if server in (names := _names(secured)):
        return ""
    return (
        f"the certificate of {endpoint} is that of {', '.join(names) or 'no DNS name'}, not of {server}: check the address, and "
        "the folder that the --tls of the process there names"
    )


def _names(secured: ssl.SSLSocket) -> list[str]:
    shown: Any = secured.getpeercert() or {}
    return [str(value) for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"]


def _refusal(endpoint: str, secured: ssl.SSLSocket, papers: Papers) -> str:
    """Return why the server ended the connection after it saw our certificate; empty if it did not.

    A gRPC server speaks first, and ends a connection that it refuses without a word.
    """
    try:
        if secured.recv(1):
            return ""
    except TimeoutError:
        return ""
    except OSError:
        pass
    if papers.until <= datetime.now(UTC):
        return (
            f"{endpoint} refuses {papers.folder / CHAIN}, which expired at {papers.until:%Y-%m-%d %H:%M} UTC: renew it, for "
            "example with `headrace certs`"
        )
    return (
        f"{endpoint} refuses {papers.folder / CHAIN}: it is of no authority in the {AUTHORITIES} of the folder that the --tls of "
        "the process there names, or not made for clients"
    )
