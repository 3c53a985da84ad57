"""A crew runs tests as one process would: what is printed, retried, left over and torn down; and a member that dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.crew.dealing import Deck, TestFile

ROOT = Path(__file__).parents[3]
PLUGINS = ["tests.crew.crew_plugin", "pytest_rerunfailures", "pytest_timeout", "no:cacheprovider"]
LIMIT_S = 100.0
CONFTEST = """
import os, pathlib, pytest

@pytest.fixture(scope="session")
def server(tmp_path_factory):
    yield tmp_path_factory.mktemp("server")
    pathlib.Path(os.environ["TOLD"], f"{os.getpid()}").touch()
"""
MIXED = """
import os, subprocess, sys, time, pytest

def test_passes(server, tmp_path):
    os.write(1, b"of one that passes\\n")
    assert tmp_path.parent == server.parent

def test_fails(server):
    print("by Python")
    subprocess.run(["echo", "by a child"], check=True)
    assert [1, 2] == [1, 3]

@pytest.mark.skip(reason="not today")
def test_skipped(): ...

@pytest.mark.xfail
def test_fails_as_expected(): assert False

tries = []

@pytest.mark.flaky(reruns=1)
def test_needs_another_try():
    tries.append(1)
    assert len(tries) == 2

@pytest.mark.timeout(0.2)
def test_hangs():
    time.sleep(100)

@pytest.fixture
def ending():
    yield
    raise OSError("the fixture could not end")

def test_ends_badly(ending): ...
"""
DYING = """
import os, signal

def test_before(server): ...
def test_dies(server): os.kill(os.getpid(), signal.SIGSEGV)
def test_after(server): ...
"""


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """pytest in that folder, with what it says on stdout."""
    command = [sys.executable, "-m", "pytest", "--disable-plugin-autoload", *(f"-p{name}" for name in PLUGINS), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOLD": str(folder / "told"), "COLUMNS": "200"}
    (folder / "told").mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def write(folder: Path, **files: str) -> None:
    for name, content in files.items():
        (folder / f"test_{name}.py").write_text(content)


def test_tests_end_as_without_a_crew_and_one_that_kills_its_process_fails_alone(tmp_path: Path) -> None:
    write(tmp_path, mixed=MIXED, dying=DYING, other="def test_other(server): ...")
    process = start(tmp_path, "--crew", "2", "-rfERs")
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert re.search(r"3 failed, 6 passed, 1 skipped, 1 xfailed, 1 error, 1 rerun in", said), said
    assert "RERUN test_mixed.py::test_needs_another_try" in said
    assert "FAILED test_dying.py::test_dies - the process that ran it ended with SIGSEGV" in said
    assert "SKIPPED [1] test_mixed.py:13: not today" in said
    assert "ERROR test_mixed.py::test_ends_badly - OSError: the fixture could not end" in said
    assert "assert [1, 2] == [1, 3]" in said
    assert "by Python\nby a child\n" in said
    assert "of one that passes" not in said
    assert "Timeout (>0.2s) from pytest-timeout" in said
    assert len([*(tmp_path / "told").iterdir()]) == 2, "each member tears down what it has set up, but for the one that died"


def test_an_error_of_what_is_torn_down_at_the_end_is_told(tmp_path: Path) -> None:
    write(tmp_path, other="def test_other(server): ...")
    process = start(tmp_path, "--crew", "1")
    (tmp_path / "told").rmdir()
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "1 passed, 1 error" in said


def test_where_the_run_is_broken_off_members_tear_down_and_end(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    waiting = f"import time\ndef test_waits(server):\n    open({str(begun)!r}, 'w').close()\n    time.sleep(100)"
    write(tmp_path, waiting=waiting)
    process = start(tmp_path, "--crew", "2")
    while not begun.exists():
        assert process.poll() is None
        time.sleep(0.02)  # polls a real process
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, said
    assert len([*(tmp_path / "told").iterdir()]) == 1


def test_a_process_with_threads_is_not_forked(tmp_path: Path) -> None:
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(100,), daemon=True).start()\ndef test_one(): ..."
    write(tmp_path, threads=thread)
    process = start(tmp_path, "--crew", "2")
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == pytest.ExitCode.USAGE_ERROR
    assert "has begun threads" in said


def file_of(room: str, *tests: int) -> TestFile:
    return TestFile(room=room, tests=tests, load=len(tests))


def test_members_stay_in_their_rooms_and_begin_with_the_largest_files() -> None:
    large, small = file_of("large", 1, 2, 3), file_of("large", 4)
    other, last = file_of("other", 5, 6), file_of("other", 7)
    deck = Deck([small, large, last, other])
    assert deck.take("") is large
    assert deck.take("") is other, "nobody is there yet"
    assert deck.take("large") is small
    assert deck.take("large") is last, "to help"
    assert deck.take("other") is None


def test_who_comes_to_no_room_of_its_own_helps_where_most_is_left() -> None:
    deck = Deck([file_of("a", 1), file_of("a", 2), file_of("b", 3), file_of("b", 4), file_of("b", 5)])
    assert [file.room for _ in range(3) if (file := deck.take(""))] == ["b", "a", "b"]


def test_what_a_dead_member_has_left_comes_next() -> None:
    deck = Deck([file_of("a", 1), file_of("a", 2)])
    deck.put_back(left := file_of("a", 3))
    assert deck.take("a") is left
