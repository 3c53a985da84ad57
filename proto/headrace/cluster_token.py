"""The cluster token: one shared secret that authenticates all processes of a cluster to each other.

Clients send it with every call (headrace.admission), and servers refuse calls without it. It comes from the environment or from a
file, never from the command line, which every user of the machine can read. A client without a token sends none, and a server
without one accepts every call: that is meant for the loopback interface. Where the reorder service knows tokens with roles
(headrace.token_folder), a client's token is one of these.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.endpoint_form import check_endpoint
from headrace.errors import UserError

log = logging.getLogger(__name__)

TOKEN = "HEADRACE_CLUSTER_TOKEN"
TOKEN_FILE = "HEADRACE_CLUSTER_TOKEN_FILE"
LEAST_CHARACTERS = 16
FILE_TIMEOUT_S = 30.0  # how long a process waits for another one to create the token file


def cluster_token() -> str:
    """Return the cluster token from HEADRACE_CLUSTER_TOKEN or from the file that HEADRACE_CLUSTER_TOKEN_FILE names.

    Of a file with several tokens, one a line, the first. Empty if neither is set. Both are read anew at every call. Raises
    UserError if the file is unreadable or the token is invalid.
    """
    if token := os.environ.get(TOKEN, "").strip():
        return validated_token(token, TOKEN)
    if not (file := os.environ.get(TOKEN_FILE, "")):
        return ""
    try:
        return validated_token(next((line for _, line in token_lines(Path(file).read_text(encoding="utf-8"))), ""), file)
    except (OSError, UnicodeDecodeError) as err:
        raise UserError(f"cannot read the cluster's token from {file}: {err}") from err


def token_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file of tokens with their numbers from 1 on, without blank ones and those that begin with #."""
    for number, line in enumerate(text.splitlines(), 1):
        if (token := line.strip()) and not token.startswith("#"):
            yield number, token


def await_token_file(timeout_s: float = FILE_TIMEOUT_S) -> None:
    """Wait until the token file named in the environment exists, if one is named: the reorder service creates it, and processes
    started together with it wait here. After `timeout_s` it returns without an error: `cluster_token` then says what is missing.
    """
    file = os.environ.get(TOKEN_FILE, "")
    if os.environ.get(TOKEN, "").strip() or not file or os.path.exists(file):
        return
    log.warning("waiting up to %.0f s for the cluster's token in %s, which the reorder service makes", timeout_s, file)
    deadline = time.monotonic() + timeout_s
    while not os.path.exists(file) and time.monotonic() < deadline:
        time.sleep(0.1)


def validated_token(token: str, where: str = "token") -> str:
    """Return `token` unchanged if it is valid. Raises UserError, which names `where` it came from, if it is too short to be a
    secret or has characters that cannot be sent in a header."""
    if len(token) < LEAST_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"{where}: the cluster's token must be at least {LEAST_CHARACTERS} ASCII characters without blanks, "
            f"got {len(token)}: make one with `openssl rand -hex 32`"
        )
    return token


def make_token_file(path: Path) -> None:
    """Write a random token to `path`, readable only by its owner, unless the file exists. Of several processes at once, one wins.

    Raises UserError if the file cannot be written.
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


def check_exposure(
    listen: str, *, has_token: bool, tls: bool, allow_anyone: bool, allow_plaintext: bool, option: str = "--listen"
) -> None:
    """Raise UserError if a service would listen beyond the loopback interface without a token or TLS, unless that is said, and
    EndpointError for a malformed address.

    `listen`: HOST:PORT. `has_token`: whether it asks for one. `tls`: whether its port speaks TLS only. `allow_anyone`: it may go
    without a token. `allow_plaintext`: it may go without TLS. `option`: that named the address.
    """
    if is_loopback(check_endpoint(listen)):
        return
    lacks, remedies = [], []
    if not (has_token or allow_anyone):
        lacks.append("lets in whoever reaches it, and there is no cluster token")
        remedies.append(
            f"give every process a token by {TOKEN} or --cluster-token-file and this service those of all roles by --tokens, or "
            "say --allow-anyone, which serves strangers all the same"
        )
    if not (tls or allow_plaintext):
        lacks.append("sends tokens and data in the clear, since there is no TLS")
        remedies.append(
            "give every process a certificate by --tls or HEADRACE_TLS, or say --allow-plaintext, where only you read the network"
        )
    if lacks:
        raise UserError(f"{option} {listen} {', and '.join(lacks)}: {'; '.join(remedies)}; or listen on 127.0.0.1")


def is_loopback(endpoint: str) -> bool:
    """Whether the host of HOST:PORT is `localhost` or a loopback address. Other names are not looked up and count as public."""
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name, not an address
        return False
