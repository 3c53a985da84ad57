"""docker/users.acl: compose and Kubernetes make the same users of it, and a real Redis lets them do what they must, no more."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.retry import Retry

from headrace.processes import free_port
from headrace.reorder_service.store.embedded_redis import server_binary
from headrace.reorder_service.store.state import StateStore
from headrace.reorder_service.store.store_refusal import RIGHTS
from tests.kubernetes_documents import BASE, ROOT
from tests.redis_server import USERS

PASSWORD = "0123abcd"
PLACES = {  # what makes the password's digest and the users there, and where it puts them
    "docker/make_papers.sh": ("store/users.acl", "reorder/store-password"),
    "docs/kubernetes.md": ("redis-secret/users.acl", ""),
}


def _made(place: str, folder: Path) -> str:
    """The users that a script or a page makes of the file, by its own lines."""
    target, password_file = PLACES[place]
    text = (ROOT / place).read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if re.match(r"\s*(digest=|sed .*users\.acl)", line)]
    assert len(lines) == 2, f"{place} makes a digest and, of it, the users"
    for name in filter(None, (target, password_file)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if password_file:
        (folder / password_file).write_text(PASSWORD + "\n")
    script = re.sub(r" (/|docker/)users\.acl", f" {USERS}", "\n".join([f"password={PASSWORD}", *lines]))
    subprocess.run(["sh", "-euc", script], cwd=folder, check=True, timeout=60)
    return (folder / target).read_text(encoding="utf-8")


def test_compose_and_kubernetes_make_the_same_users(tmp_path: Path) -> None:
    one, other = (_made(place, tmp_path / str(number)) for number, place in enumerate(PLACES))
    assert one == other
    assert [line.split()[:3] for line in one.splitlines()] == [
        ["user", "default", "off"],
        ["user", "headrace", "on"],
        ["user", "health", "on"],
    ]
    assert hashlib.sha256(PASSWORD.encode()).hexdigest() in one


def test_the_default_user_is_off_and_keeps_its_rights() -> None:
    """Redis 7 replays its log as this user: without the rights, a restart drops every transaction."""
    assert "user default off ~* &* +@all\n" in USERS.read_text(encoding="utf-8")


def test_the_service_asks_for_the_rights_that_it_is_given() -> None:
    assert f"user headrace on #DIGEST {RIGHTS}\n" in USERS.read_text(encoding="utf-8")
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    (words,) = re.findall(r"ACL SETUSER headrace on '>PASSWORD' (.*)", page)
    assert words.replace("'", "") == RIGHTS


def test_compose_gives_the_file_to_what_makes_papers_and_both_ask_for_health_as_its_user() -> None:
    compose, pods = ((ROOT / path).read_text(encoding="utf-8") for path in ("compose.yaml", BASE / "redis.yaml"))
    assert "- ./docker/users.acl:/users.acl:ro\n" in compose
    health = r"--user health --pass health --no-auth-warning -e ping\n"
    assert (len(re.findall(health, compose)), len(re.findall(health, pods))) == (1, 2)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server with these users."""
    folder, port = tmp_path_factory.mktemp("redis"), free_port()
    _made("docker/make_papers.sh", folder)
    settings = ["--port", str(port), "--dir", str(folder), "--aclfile", str(folder / "store" / "users.acl"), "--save", ""]
    server = subprocess.Popen([server_binary(), *settings, "--appendonly", "yes"], stdout=subprocess.DEVNULL)
    try:
        with _client(port, "health", "health", Retry(ConstantBackoff(0.02), retries=300)) as client:
            client.ping()
        yield port
    finally:
        server.terminate()
        server.wait()


def _client(port: int, user: str, password: str, retry: Retry | None = None) -> redis.Redis:
    return redis.Redis(port=port, username=user, password=password, retry=retry)


async def test_the_reorder_service_has_a_store(port: int) -> None:
    """tests/unit/reorder_service has all that a store does done by the same user."""
    store = await StateStore.open(f"redis://headrace:{PASSWORD}@127.0.0.1:{port}/0")
    await store.database.lead("test")
    await store.create_job("job", "{}")
    assert await store.jobs() == ["job"]
    assert await store.database.forgetful_settings() == {"appendfsync": "everysec"}
    await store.close()


@pytest.mark.parametrize(
    "command",
    [
        ("GET", "other"),
        ("SET", "other", "1"),
        ("EVAL", "return redis.call('GET', 'other')", "0"),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("CONFIG", "SET", "appendonly", "no"),
        ("ACL", "LIST"),
        ("SCRIPT", "FLUSH"),
        ("BLPOP", "headrace:none", "1"),
        ("PUBLISH", "channel", "1"),
        ("SAVE",),
        ("SHUTDOWN", "NOSAVE"),
        ("INFO",),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_it_may_do_nothing_else(port: int, command: tuple[Any, ...]) -> None:
    with _client(port, "headrace", PASSWORD) as client, pytest.raises(ResponseError) as caught:
        client.execute_command(*command)
    assert isinstance(caught.value, NoPermissionError) or "can't access" in str(caught.value), "in a script"


def test_who_asks_for_health_may_ask_for_that_only_and_nobody_is_let_in_without_a_name(port: int) -> None:
    with _client(port, "health", "health") as client:
        assert client.ping()
        with pytest.raises(NoPermissionError):
            client.get("headrace:jobs")
    with redis.Redis(port=port) as client, pytest.raises(AuthenticationError):
        client.ping()
