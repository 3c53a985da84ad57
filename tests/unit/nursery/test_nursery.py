"""Forks of a nursery are processes like any other: with an exit code, killed by signals, and none outlives its nursery."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nursery import mother
from tests.nursery.nursery import Forked, LentNursery, Nursery
from tests.unit.nursery import forked_child

END_S = 20.0


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(forked_child.__name__, tmp_path / "nursery.log")
    yield nursery
    nursery.close()


def fork(nursery: Nursery, log: Path, code: int | None) -> Forked:
    return Forked(nursery, nursery.fork(log=str(log), code=code))


def test_a_fork_ends_with_its_code_by_a_signal_or_with_its_nursery(nursery: Nursery, tmp_path: Path) -> None:
    ended, killed, waiting = (fork(nursery, tmp_path / f"{number}.log", code) for number, code in enumerate((3, None, None)))
    assert ended.wait(END_S) == ended.poll() == 3
    assert (tmp_path / "0.log").read_text() == "here\n"
    assert killed.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        killed.wait(0.0)
    killed.kill()
    assert killed.wait(END_S) == -signal.SIGKILL
    killed.terminate()  # nothing, as it has ended
    os.kill(nursery.pid, signal.SIGKILL)
    assert waiting.wait(END_S) == -signal.SIGKILL
    with pytest.raises(TimeoutError, match="nothing was forked"):
        nursery.fork(log=str(tmp_path / "late.log"), code=0)


def test_what_a_mother_lends_ends_by_itself_and_with_her(tmp_path: Path) -> None:
    with mother.standing(forked_child.__name__) as address:
        first, second = LentNursery(address), LentNursery(address)
        ended, waiting = (fork(first, tmp_path / f"{code}.log", code) for code in (3, None))
        other = fork(second, tmp_path / "other.log", None)
        assert ended.wait(END_S) == 3
        first.close()
        assert waiting.wait(END_S) == -signal.SIGKILL
        assert other.poll() is None
    assert other.wait(END_S) == -signal.SIGKILL
    second.close()
    with pytest.raises(OSError, match="No such file"):
        LentNursery(address)
