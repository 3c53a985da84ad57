"""The lines of emulated links hold frames back, keep their order, and lose the share that they were told to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.deployment.line import MOST_FRAMES, Line


def everything(line: Line, now_s: float) -> list[bytes]:
    found = []
    while (frame := line.due(now_s)) is not None:
        found.append(frame)
    return found


@given(times=st.lists(st.floats(0, 10), min_size=1, max_size=50).map(sorted), delay_s=st.floats(0, 1))
def test_a_frame_comes_out_after_the_delay_and_in_its_turn(times: list[float], delay_s: float) -> None:
    line = Line(delay_s, 0.0, 0)
    for number, now_s in enumerate(times):
        line.put(bytes([number]), now_s)
    for number, now_s in enumerate(times):
        assert line.next_s == now_s + delay_s
        assert line.due(now_s + delay_s) == bytes([number])
    assert line.due(1e9) is None
    assert line.next_s == float("inf")


def test_nothing_comes_early() -> None:
    line = Line(1.0, 0.0, 0)
    line.put(b"frame", 5.0)
    assert line.due(5.999) is None
    assert line.due(6.0) == b"frame"


def test_the_share_that_is_lost_is_the_one_that_was_asked_for() -> None:
    lines = [Line(0.0, 0.01, seed) for seed in (1, 2)]
    for line in lines:
        for number in range(100_000):
            line.put(str(number).encode(), 0.0)
            everything(line, 0.0)
        assert line.num_frames == 100_000
        assert 900 < line.num_lost < 1_100
    assert lines[0].num_lost != lines[1].num_lost, "each draws for itself"


def test_a_line_that_is_full_loses_what_comes() -> None:
    line = Line(1.0, 0.0, 0)
    for number in range(MOST_FRAMES + 3):
        line.put(str(number).encode(), 0.0)
    assert line.num_lost == 3
    assert everything(line, 2.0) == [str(number).encode() for number in range(MOST_FRAMES)]
