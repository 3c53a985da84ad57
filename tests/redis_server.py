"""A Redis server of the user's own, which can be killed, and whose folder can be put back to an earlier moment."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from headrace.reorder_service.store.embedded_redis import server_binary
from tests.wire import free_ports

USERS = Path(__file__).parents[1] / "docker" / "users.acl"


def make_store_user(url: str, password: str) -> str:
    """Make the user of a reorder service on the server at `url`, with the rights that deployments give it; returns its URL."""
    (line,) = [line for line in USERS.read_text(encoding="utf-8").splitlines() if line.startswith("user headrace ")]
    _, *words = line.replace("DIGEST", hashlib.sha256(password.encode()).hexdigest()).split()
    with redis.Redis.from_url(url) as client:
        client.execute_command("ACL", "SETUSER", *words)
    return url.replace("://", f"://headrace:{quote(password, safe='')}@")


class RedisServer:
    """A server with its append-only file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (self.port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, appendfsync: str = "always") -> None:
        settings = ["--port", str(self.port), "--dir", str(self._folder), "--appendonly", "yes", "--appendfsync", appendfsync]
        self.process = subprocess.Popen([server_binary(), *settings, "--save", ""], stdout=subprocess.DEVNULL)
        with redis.Redis(port=self.port, retry=Retry(ConstantBackoff(0.02), retries=300)) as client:
            client.ping()

    def set(self, name: str, value: str) -> None:
        """Change a setting of the running server."""
        with redis.Redis(port=self.port) as client:
            client.config_set(name, value)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def keep(self, copy: Path) -> None:
        """Copy what it has written so far, whole commands only."""
        shutil.copytree(self._folder, copy)

    def put_back(self, copy: Path) -> None:
        """Kill it, and start it with what it had when the copy was made: what it was told since is forgotten."""
        self.kill()
        shutil.rmtree(self._folder)
        shutil.copytree(copy, self._folder)
        self.start()
