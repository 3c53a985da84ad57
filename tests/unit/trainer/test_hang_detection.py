"""What is taken for a hang of a job or for the end of a rank, and what is not."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.hang_detection import Patience, hung_job, silent_rank
from headrace.trainer.loading.pack_ahead import PackAhead
from headrace.trainer.rank_progress import PROGRESS, Progress, ProgressReport
from headrace.trainer.side_channel import Heard

PATIENCE = Patience(hang_s=60.0)
WAITING = ProgressReport(
    place="llm", step=3, doing="F 2", at="trainer.gradients:27 sum_gradients", waits=True, idle_s=61.0, excuse=""
)
COMPUTING = dataclasses.replace(WAITING, at="trainer.models.block:40 forward", waits=False)


def test_a_job_hangs_when_no_rank_gets_on_and_who_does_not_wait_is_named() -> None:
    words = hung_job({0: WAITING, 1: COMPUTING, 2: WAITING}, PATIENCE)
    assert words == (
        "no rank has got on for 60 s (--hang-timeout): rank 1 (llm) at step 3, F 2, trainer.models.block:40 forward; "
        "the others wait"
    )
    assert "rank 0 (llm) at step 3" in (words := hung_job(dict.fromkeys(range(9), WAITING), PATIENCE))
    assert words.endswith("and 5 more; all wait")


@given(
    st.dictionaries(st.integers(0, 20), st.floats(0.0, 1000.0), min_size=1),
    st.integers(0, 20),
)
def test_a_job_does_not_hang_while_one_rank_gets_on(idle_s: dict[int, float], moving: int) -> None:
    reports = {rank: dataclasses.replace(WAITING, idle_s=seconds) for rank, seconds in idle_s.items()}
    assert hung_job({**reports, moving: dataclasses.replace(COMPUTING, idle_s=PATIENCE.hang_s)}, PATIENCE) == ""
    assert bool(hung_job(reports, PATIENCE)) == (min(idle_s.values()) > PATIENCE.hang_s)


def test_a_rank_is_silent_after_thirty_seconds_or_the_timeout_and_soon_after_an_alarm() -> None:
    heard = {1: Heard(report=WAITING, beat=7, since_s=100.0), 2: Heard(report=WAITING, beat=9, since_s=98.0)}
    assert silent_rank(heard, 128.0, PATIENCE, alarmed=False) == ""
    assert silent_rank(heard, 128.5, PATIENCE, alarmed=False).startswith("rank 2 (llm) has said nothing for 30 s")
    assert silent_rank(heard, 100.5, PATIENCE, alarmed=True).startswith("rank 2 (llm) has said nothing for 2 s")
    assert silent_rank(heard, 140.0, PATIENCE, alarmed=False).startswith("rank 2"), "the one that has been silent for longest"
    assert silent_rank({}, 140.0, PATIENCE, alarmed=True) == ""
    assert silent_rank(heard, 103.5, Patience(hang_s=5.0), alarmed=False).startswith("rank 2")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_idle_time_counts_from_the_last_thing_that_began(clock: Clock) -> None:
    progress = Progress(clock)
    progress.begin_step(4)
    clock.now_s = 10.0
    progress.begin(("F", 1))
    clock.now_s = 25.0
    report = progress.report()
    assert (report.step, report.doing, report.idle_s, report.excuse) == (4, "('F', 1)", 15.0, "")
    progress.move()  # an outage of the service, which the wait for a commit notices
    assert progress.report().idle_s == 0.0


def test_what_has_a_time_limit_of_its_own_is_no_idle_time(clock: Clock) -> None:
    """The start before the first step, waits for data, what is between steps."""
    progress = Progress(clock)
    clock.now_s = 5000.0
    assert (progress.report().idle_s, progress.report().excuse) == (0.0, "starts")
    progress.begin_step(0)
    with progress.excused("waits for data"):
        clock.now_s = 9000.0
        assert progress.report().excuse == "waits for data"
    clock.now_s = 9001.0
    assert progress.report().idle_s == 1.0
    progress.excuse("waits for the next step")
    clock.now_s = 10000.0
    assert progress.report().idle_s == 0.0
    progress.begin_step(1)
    assert (progress.report().excuse, progress.report().idle_s) == ("", 0.0)


def test_a_report_says_where_the_main_thread_is_and_whether_it_waits_there() -> None:
    """Asked for by another thread, while the main one waits for it inside of Headrace."""
    arrived = threading.Event()
    reports: list[ProgressReport] = []

    def look() -> None:
        arrived.wait()
        reports.append(PROGRESS.report())

    def pack(_: str) -> None:
        arrived.set()
        looking.join()

    looking = threading.Thread(target=look)
    looking.start()
    PackAhead(pack, lambda _: False).take("item")
    assert reports[0].at.startswith("trainer.loading.pack_ahead:")
    assert reports[0].at.endswith(" take")
    assert reports[0].waits
    assert reports[0].excuse == "waits for data"
