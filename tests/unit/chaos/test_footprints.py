"""A process that goes on taking more is found; one that was started again begins anew."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.chaos.footprints import ALLOWED_FDS, ALLOWED_KIB, WARM_ROUNDS, Footprints, Growth
from tests.chaos.processes import Footprint, Standing


@pytest.mark.parametrize(
    ("more_kib", "more_fds", "rounds", "allowed"),
    [
        (ALLOWED_KIB, ALLOWED_FDS, 1, True),
        (2 * ALLOWED_KIB, 0, 1, False),
        (2 * ALLOWED_KIB, 0, 1000, True),
        (0, ALLOWED_FDS + 1, 1000, False),
        (-ALLOWED_KIB, -20, 3, True),
    ],
)
def test_what_is_allowed(more_kib: int, more_fds: int, rounds: int, allowed: bool) -> None:
    before = Footprint(memory_kib=300_000, num_fds=30)
    after = Footprint(memory_kib=before.memory_kib + more_kib, num_fds=before.num_fds + more_fds)
    assert Growth(name="redis", rounds=rounds, before=before, after=after).is_allowed == allowed


def test_a_life_is_compared_from_its_warm_rounds_on(tmp_path: Path) -> None:
    """Real processes that do nothing: the second life is too short to say anything."""
    process = Standing("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", ready="")
    footprints = Footprints()
    try:
        for _ in range(WARM_ROUNDS + 3):
            footprints.look([process])
        assert [(growth.name, growth.rounds) for growth in footprints.lives] == [("sleeper", 3)]
        process.kill()
        process.start()
        footprints.look([process])
        assert len(footprints.lives) == 1
        assert footprints.grown == []
    finally:
        process.kill()


def test_a_process_that_ends_by_itself_is_started_again_and_told_of_where_it_had_begun_to_work(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('at work', flush=True); time.sleep(60)"]
    process = Standing("worker", command, tmp_path / "log", ready="at work")
    try:
        while not process.is_ready():
            assert process.look_after() == ""
        process.signal(signal.SIGTERM)
        process.popen.wait()
        assert process.look_after() == "worker ended by itself (-15): at work"
        while not process.is_ready():
            assert process.look_after() == ""
        process.kill()
        assert process.look_after() == "", "that was us"
        assert not process.is_ready()
    finally:
        process.kill()
