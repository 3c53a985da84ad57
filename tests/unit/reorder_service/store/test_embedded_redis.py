"""The embedded store: its folder, its server and its files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import ConflictError, UnavailableError
from headrace.reorder_service.store import embedded_redis, redis_database
from headrace.reorder_service.store.state import StateStore


def server_of(folder: Path) -> int:
    """The process id of the server that works in `folder`."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").resolve() == folder.resolve() and b"redis" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError(f"no server works in {folder}")


async def another_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(embedded_redis, "_LOCK_TIMEOUT_S", 0.1)
        with pytest.raises(ConflictError, match="in use by another"):
            await StateStore.open(f"embedded:{folder}")


async def test_the_embedded_folder_belongs_to_one_service_and_its_server_ends_with_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 40) / "store"
    store = await StateStore.open(f"embedded:{folder}")
    server = server_of(folder)
    await another_is_refused(folder, monkeypatch)
    await store.create_job("job", "{}")
    await store.close()
    assert not is_running(server)
    again = await StateStore.open(f"embedded:{folder}")
    assert await again.jobs() == ["job"]
    await again.close()


def is_running(process: int) -> bool:
    """A zombie that nobody has reaped yet does not run."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


OWNER = """
import asyncio, sys
from headrace.reorder_service.store.state import StateStore

async def main():
    store = await StateStore.open(sys.argv[1])
    await store.create_job("job", "{}")
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def start_owner(folder: Path) -> subprocess.Popen[bytes]:
    """Another process that holds the store."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, f"embedded:{folder}"], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    return owner


async def test_the_embedded_server_does_not_outlive_a_killed_service_and_its_data_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    with start_owner(folder) as owner:
        server = server_of(folder)
        try:
            await another_is_refused(folder, monkeypatch)
        finally:
            owner.kill()
    store = await StateStore.open(f"embedded:{folder}")  # waits for the folder, which the dying server still holds
    assert not is_running(server)
    assert await store.jobs() == ["job"]
    await store.close()


@pytest.mark.usefixtures("open_umask")
async def test_what_the_embedded_server_writes_is_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    for _ in range(2):
        store = await StateStore.open(f"embedded:{folder}")
        await store.create_job("job", "{}")
        modes = {path.name: oct(path.stat().st_mode & 0o077) for path in (folder, *folder.iterdir()) if path.name != "lock"}
        await store.close()
        assert set(modes.values()) == {"0o0"}, modes
        assert {"appendonly.aof", "redis.log", "redis.sock"} <= set(modes)
        (folder / "appendonly.aof").chmod(0o644)  # as an older release left it


@pytest.fixture
def open_umask() -> Iterator[None]:
    former = os.umask(0o022)
    yield
    os.umask(former)


@pytest.mark.slow
@pytest.mark.timeout(20)
async def test_a_server_that_hangs_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_database, "_TIMEOUT_S", 0.5)
    store = await StateStore.open(f"embedded:{tmp_path / 'store'}")
    server = server_of(tmp_path / "store")
    os.kill(server, signal.SIGSTOP)
    try:
        with pytest.raises(UnavailableError, match="does not answer"):
            await store.jobs()
    finally:
        os.kill(server, signal.SIGCONT)
    assert await store.jobs() == []
    await store.close()
