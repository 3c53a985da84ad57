"""The cluster's token: one secret that all processes of a cluster know. It lets in whoever says it; nobody else gets anything.

Clients send it with every call (headrace.admission), and servers compare it. It comes from the environment or from a file, never
from the command line, which every user of the machine can read. A process without one says none, and a server without one asks
for none: that is for the loopback interface.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import tempfile
import time
from pathlib import Path

from headrace.errors import UserError

log = logging.getLogger(__name__)

TOKEN = "HEADRACE_CLUSTER_TOKEN"
TOKEN_FILE = "HEADRACE_CLUSTER_TOKEN_FILE"
LEAST_CHARACTERS = 16
FILE_TIMEOUT_S = 30.0  # for which a process waits for the file that another one is to make


def cluster_token() -> str:
    """What the environment says: the token itself, or the file that it is in; empty: neither. Read anew at every call.

    Raises UserError where the file cannot be read, or the token is none.
    """
    if token := os.environ.get(TOKEN, "").strip():
        return checked(token, TOKEN)
    if not (file := os.environ.get(TOKEN_FILE, "")):
        return ""
    try:
        return checked(Path(file).read_text(encoding="utf-8").strip(), file)
    except (OSError, UnicodeDecodeError) as err:
        raise UserError(f"cannot read the cluster's token from {file}: {err}") from err


def await_token_file(timeout_s: float = FILE_TIMEOUT_S) -> None:
    """Wait until the token's file is there, where the environment names one: of processes that are started together, the reorder
    service makes it. After `timeout_s` without it nothing is raised: `cluster_token` says what is missing.
    """
    file = os.environ.get(TOKEN_FILE, "")
    if os.environ.get(TOKEN, "").strip() or not file or os.path.exists(file):
        return
    log.warning("waiting up to %.0f s for the cluster's token in %s, which the reorder service makes", timeout_s, file)
    deadline = time.monotonic() + timeout_s
    while not os.path.exists(file) and time.monotonic() < deadline:
        time.sleep(0.1)


def checked(token: str, where: str = "token") -> str:
    """The token itself. Raises UserError where it is too short to be a secret, or cannot be sent."""
    if len(token) < LEAST_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"{where}: the cluster's token must be at least {LEAST_CHARACTERS} ASCII characters without blanks, "
            f"got {len(token)}: make one with `openssl rand -hex 32`"
        )
    return token


def make_token_file(path: Path) -> None:
    """A random token in a file that only its owner can read, unless there is one: of several who make it, one wins.

    Raises UserError where it cannot be written.
    """
    try:
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=".token-")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(secrets.token_hex(32) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
        finally:
            os.unlink(made)
    except OSError as err:
        raise UserError(f"cannot write the cluster's token to {path}: {err}") from err


def check_exposure(listen: str, token: str, *, allow_anyone: bool) -> None:
    """Raises UserError for a service that would serve whoever reaches it, unless that was asked for by name.

    `listen`: HOST:PORT.
    """
    if not (token or allow_anyone or is_loopback(listen)):
        raise UserError(
            f"--listen {listen} lets in whoever reaches it, and there is no cluster token: give every process the same one by "
            f"{TOKEN} or --cluster-token-file, or listen on 127.0.0.1; --allow-anyone serves strangers all the same"
        )


def is_loopback(endpoint: str) -> bool:
    """Whether HOST:PORT can be reached from this machine only, as far as HOST itself says so."""
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False
