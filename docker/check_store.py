"""What a test of compose.yaml checks of the store: it speaks TLS only, to who has papers, and shows renewed ones."""

from __future__ import annotations

import subprocess

from check_protocol import Protocol, expect
from engine import Compose, run, wait_until

PATIENCE_S = 120.0
TRUSTING = ("--tls", "--cacert", "/run/headrace/ca.crt")
SHOWN = ("--cert", "/run/headrace/tls.crt", "--key", "/run/headrace/tls.key")
RENEWED = "headrace certs /papers --renew --store-host redis && sh /make_papers.sh"


def check_store(protocol: Protocol, compose: Compose) -> None:
    """Ask the store in its container, then renew all papers while the services run."""
    with protocol.check("the store speaks TLS only, to who has papers"):
        answers = [_answers(compose, *options) for options in ((), TRUSTING, (*TRUSTING, *SHOWN))]
        expect("answers in plain text, without a certificate, with one", answers, [False, False, True])
    with protocol.check("renewed papers: the store is started again with them") as notes:
        before = _starts(compose)
        compose("run", "--rm", "--no-deps", "--entrypoint", "sh", "papers", "-ec", RENEWED)
        wait_until("the store to start again", lambda: _starts(compose) > before, timeout_s=PATIENCE_S)
        wait_until("the store to be healthy", lambda: compose.healthy("redis") == 1, timeout_s=PATIENCE_S)
        wait_until("the service to be healthy", lambda: compose.healthy("reorder") == 1, timeout_s=PATIENCE_S)
        notes.append(f"{_starts(compose) - before} start(s)")


def _answers(compose: Compose, *options: str) -> bool:
    """Whether Redis answers a client with these options, if only that it has to say who it is."""
    (redis,) = compose.containers("redis")
    command = ["docker", "exec", redis, "redis-cli", *options, "ping"]
    ended = subprocess.run(command, text=True, capture_output=True, timeout=60.0)
    return any(word in ended.stdout + ended.stderr for word in ("PONG", "NOAUTH"))


def _starts(compose: Compose) -> int:
    """How often the engine has started the store's container again."""
    (redis,) = compose.containers("redis")
    return int(run(["docker", "inspect", "--format", "{{.RestartCount}}", redis]))
