"""The log of connections that TLS turns away (HEADRACE_LOG_CONNECTIONS).

gRPC tells Python nothing of a connection whose handshake fails. It only traces handshakes, some ten long lines for each, to file
descriptor 2. While a service asks for this log, that descriptor is a pipe: of the trace, a handshake that failed becomes a line
of the service's own log, and the rest is dropped; what others write there, such as child processes, goes on to standard error.
What native code writes in the moment in which it ends the process may be lost, and so may lines while more come than can be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import threading
from collections.abc import Iterator
from urllib.parse import unquote

from headrace.refused_connections import ConnectionLog

LOG_CONNECTIONS = "HEADRACE_LOG_CONNECTIONS"
"""Name of the variable that asks for this log; empty or 0: nobody does. `headrace.cli.main` has gRPC trace handshakes then."""

_PIPE_BYTES = 1 << 20  # the most that a system gives by default: the trace of some hundred connections
_MOST_LINE = 1 << 16  # bytes of a line that are kept until its end comes
_MOST_REASON = 120  # characters of a reason that is not known here
_STDERR = 2

_BEGINS = re.compile(r"[IWE]\d{4} \d\d:\d\d:\S+ +\d+ |WARNING: All log messages before absl::InitializeLog")
_GOES_ON = re.compile(r"=== Source Location Trace: ===|src/core/\S+:\d+$| shutdown=|$")
_FAILED = re.compile(r"Handshake\w*: error=(?!OK\b)(?P<error>.*) shutdown=\w+ index=\d+, args=\{(?P<args>.*)")
_PEER = re.compile(r"endpoint_peer_address=([^,}\s]+)")
_OF_SERVERS = "grpc.internal.server_credentials="  # clients' handshakes are traced as well
_REASONS = {
    "wrong version number": "plain text",
    "http request": "plain text",
    "peer did not return a certificate": "no certificate",
    "certificate has expired": "expired certificate",
    "certificate is not yet valid": "certificate not yet valid",
    "certificate verify failed": "foreign certificate",
    "read failed": "hung up",
    "timed out": "silent",
}
"""Words of gRPC's TLS (BoringSSL, in capitals) or of Arrow Flight's (OpenSSL), and what they say in the log."""


class Trace:
    """Reads what is written to standard error line by line, and knows of each whether gRPC wrote it.

    gRPC writes a failed handshake in one line or in several, of which the last has the peer.
    """

    def __init__(self) -> None:
        self._begun = ""
        self._goes_on = False

    def take(self, line: str) -> tuple[bool, tuple[str, str] | None]:
        """Return whether a line is gRPC's, and who was turned away and why if it tells that: a peer, as `headrace.refusals` names
        them, and a reason."""
        if _BEGINS.match(line):
            self._begun, self._goes_on = line, True
        elif self._goes_on and _GOES_ON.match(line):
            self._begun += line if line.startswith(" shutdown=") else ""
        else:
            self._begun, self._goes_on = "", False
            return False, None
        failed = _FAILED.search(self._begun)
        if failed is None or _OF_SERVERS not in failed["args"] or (peer := _PEER.search(failed["args"])) is None:
            return True, None
        self._begun = ""
        error = failed["error"].lower().replace("_", " ")
        reason = next((reason for words, reason in _REASONS.items() if words in error), failed["error"][:_MOST_REASON])
        return True, (unquote(peer[1]), reason)


@contextlib.contextmanager
def connections_logged() -> Iterator[None]:
    """Log connections that TLS turns away during the block, if the environment asks for it."""
    if os.environ.get(LOG_CONNECTIONS, "") in ("", "0"):
        yield
        return
    sys.stderr.flush()
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    os.set_blocking(writing, False)  # who writes may hold the interpreter's lock, without which nobody reads
    kept, before = os.dup(_STDERR), sys.stderr
    os.dup2(writing, _STDERR)
    os.close(writing)
    # Not through the pipe: our own log and tracebacks.
    sys.stderr = open(kept, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sifting = threading.Thread(
        target=_sift, args=(reading, kept, ConnectionLog(_REASONS.values())), name="connection-log", daemon=True
    )
    sifting.start()
    try:
        yield
    finally:
        os.dup2(kept, _STDERR)
        sys.stderr = before
        sifting.join(1.0)  # child processes may hold the pipe open for longer


def _sift(reading: int, kept: int, connections: ConnectionLog) -> None:
    """Read lines until all writers have closed the pipe; pass on to `kept` what gRPC has not written."""
    trace, rest = Trace(), b""
    while piece := os.read(reading, _MOST_LINE):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _MOST_LINE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            is_grpcs, refused = trace.take(line.decode(errors="backslashreplace"))
            if refused is not None:
                connections.note(*refused)
            elif not is_grpcs:
                _pass_on(line + b"\n", kept)
    _pass_on(rest, kept)


def _pass_on(text: bytes, kept: int) -> None:
    with contextlib.suppress(OSError):  # nobody reads standard error any more
        os.write(kept, text)
