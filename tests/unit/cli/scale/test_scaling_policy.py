"""How many preprocessors `headrace scale` asks for, in single situations and over hours of recorded work."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.bottleneck import WAITS
from headrace.cli.scale.scaling_policy import MOST_GROWTH, REMEMBER_S, START_S, Load, ScalingPolicy, needed

INTERVAL_S, COOL_DOWN_S = 15.0, 300.0
MAXIMUM = 32


def load(count: int, wait: float = 0.0, **fields: Any) -> Load:
    """Of preprocessors that are all busy where trainers wait, and half of them where they do not."""
    busy = float(count) if wait else count / 2
    return Load(
        **{
            "preprocessors": count,
            "busy": busy,
            "wait": wait,
            "helps": True,
            "begins": False,
            "samples_per_s": 100.0,
            "why": "because",
        }
        | fields
    )


def policy(minimum: int = 1, maximum: int = MAXIMUM) -> ScalingPolicy:
    return ScalingPolicy(minimum, maximum, COOL_DOWN_S, least_wait=WAITS)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (load(2, wait=0.5), 4),
        (load(3, wait=0.25), 4),
        (load(8, wait=WAITS), 9),
        (load(2, wait=1.0), 2 * MOST_GROWTH),
        (load(2, wait=0.5, helps=False), 2),
        (load(10, busy=5.0), 6),
        (load(10, busy=9.9), 10),
        (load(4, wait=WAITS / 2, busy=4.0), 4),
    ],
)
def test_trainers_that_wait_half_their_time_need_twice_as_many_and_others_as_many_as_are_busy(given: Load, wanted: int) -> None:
    assert needed(given, WAITS).wanted == wanted


def test_there_are_more_at_once_and_no_more_while_those_have_not_come() -> None:
    scaling = policy()
    assert scaling.decide(load(2, wait=0.5), 0.0).wanted == 4
    waiting = scaling.decide(load(3, wait=0.5), INTERVAL_S)
    assert (waiting.wanted, waiting.why) == (4, "3 are connected so far")
    assert scaling.decide(load(3, wait=0.4, samples_per_s=150.0), START_S).wanted == 5, "one of them does not come"


def test_those_that_have_come_or_were_lost_are_measured_first() -> None:
    scaling = policy()
    assert scaling.decide(load(2, wait=0.5), 0.0).wanted == 4
    come = scaling.decide(load(4, wait=0.3), INTERVAL_S)
    assert (come.wanted, come.why) == (4, "4 are connected since, and not measured yet")
    assert scaling.decide(load(4, busy=4.0), 2 * INTERVAL_S).wanted == 4
    assert scaling.decide(load(3, wait=0.3), START_S).wanted == 4, "one is to come in its place"


def test_there_are_fewer_once_fewer_would_have_done_for_the_whole_cool_down() -> None:
    scaling = policy()
    times = itertools.takewhile(lambda at_s: at_s < COOL_DOWN_S, itertools.count(0.0, INTERVAL_S))
    assert {scaling.decide(load(10, busy=2.0), at_s).wanted for at_s in times} == {10}
    assert scaling.decide(load(10, busy=3.0), COOL_DOWN_S).wanted == 4, "as many as the busiest of those decisions needed"
    assert scaling.decide(load(10, busy=3.0), COOL_DOWN_S + INTERVAL_S).wanted == 4, "those that go are not gone yet"


def test_a_number_that_was_too_few_is_not_gone_back_to_for_an_hour_unless_the_work_is_another() -> None:
    def lowered(busy: float, after_s: float) -> int:
        scaling = policy()
        scaling.decide(load(4, wait=0.4), 0.0)
        times = (after_s, after_s + INTERVAL_S, after_s + INTERVAL_S + COOL_DOWN_S)
        *first, last = [scaling.decide(load(7, busy=busy), at_s).wanted for at_s in times]
        assert first == [7, 7]
        return last

    assert lowered(busy=3.0, after_s=START_S) == 5
    assert lowered(busy=3.0, after_s=REMEMBER_S) == 4
    assert lowered(busy=1.0, after_s=START_S) == 2


def test_more_that_made_nothing_faster_are_the_last_for_an_hour() -> None:
    scaling = policy()
    assert scaling.decide(load(4, wait=0.5, samples_per_s=100.0), 0.0).wanted == 8
    scaling.decide(load(8, wait=0.5, samples_per_s=105.0), INTERVAL_S)
    stopped = scaling.decide(load(8, wait=0.5, samples_per_s=105.0), 2 * INTERVAL_S)
    assert (stopped.wanted, stopped.why) == (8, "because, but more did not make them faster")
    assert scaling.decide(load(8, wait=0.5, samples_per_s=105.0), 2 * INTERVAL_S + REMEMBER_S).wanted == 16


def test_limits_are_kept_and_said() -> None:
    decision = policy(maximum=3).decide(load(2, wait=0.5), 0.0)
    assert (decision.wanted, decision.why) == (3, "because; 4 would do, the most is 3")
    decision = policy(minimum=2).decide(load(0, busy=0.0), 0.0)
    assert (decision.wanted, decision.why) == (2, "because; 0 would do, the least is 2")


def test_a_job_that_begins_leaves_the_number_alone_for_as_long_as_it_does() -> None:
    scaling = policy()
    times = (0.0, COOL_DOWN_S, 2 * COOL_DOWN_S)
    assert [scaling.decide(load(10, busy=0.0, begins=True), at_s).wanted for at_s in times] == [10, 10, 10]
    assert scaling.decide(load(10, wait=0.5, begins=True), 3 * COOL_DOWN_S).wanted == 20, "another job's trainers wait"


def test_without_any_job_the_fewest_are_enough_after_the_cool_down() -> None:
    scaling = policy(minimum=2)
    scaling.decide(load(10, wait=0.04, busy=9.0), 0.0)
    assert scaling.decide_without_jobs(INTERVAL_S) is None
    assert scaling.decide_without_jobs(INTERVAL_S + COOL_DOWN_S - 1) is None
    idle = scaling.decide_without_jobs(INTERVAL_S + COOL_DOWN_S)
    assert idle is not None
    assert (idle.wanted, idle.why) == (2, "there has been no job for 300 s")
    later_s = 2 * COOL_DOWN_S
    assert scaling.decide(load(2, wait=0.5), later_s).wanted == 2, "they have gone since, and are measured first"
    assert scaling.decide(load(2, wait=0.5), later_s + INTERVAL_S).wanted == 4
    assert scaling.decide_without_jobs(later_s + 2 * INTERVAL_S) is None, "the cool-down begins anew"


# -- hours of recorded work -------------------------------------------------------------------------------------------

RECORDED: dict[str, list[float]] = json.loads(
    (Path(__file__).parents[3] / "data/scaling/decode_ms.json").read_text(encoding="utf-8")
)
"""Milliseconds of a core that samples took to decode, in the order of their data set, by kind of data."""
GLOBAL_BATCH, WINDOW = 16, 4
LARGER = 20  # times what was recorded, so that a decision sees a dozen steps and not hundreds
COMES_AFTER_S, GOES_AFTER_S = 25.0, 5.0
PHASES = ((2400.0, 5.3), (2400.0, 11.6), (7200.0, 2.4))
"""Seconds, and how many preprocessors' work the SIMULATED trainer takes in them: it gets more GPUs, and then fewer."""


@dataclass
class Run:
    """A trainer and its preprocessors, simulated, and every decision on them."""

    decisions: list[tuple[float, int, float]] = field(default_factory=list)
    """(time, number wanted, number needed)."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """(time, share of the interval before it that the trainer waited)."""
    gone: list[int] = field(default_factory=list)
    """Numbers wanted once the trainer has gone, every INTERVAL_S."""

    @property
    def directions(self) -> list[int]:
        """Of every change: up 1, down -1."""
        wanted = [1, *(number for _, number, _ in self.decisions)]
        return [1 if after > before else -1 for before, after in itertools.pairwise(wanted) if after != before]


def simulated(decode_ms: Sequence[float]) -> Run:
    """All phases in turn, from one preprocessor on, which decode one step after the other, all of them each."""
    run, scaling = Run(), policy()
    costs = itertools.cycle(
        LARGER * 1e-3 * sum(itertools.islice(itertools.cycle(decode_ms), first, first + GLOBAL_BATCH))
        for first in range(0, len(decode_ms), GLOBAL_BATCH)
    )
    mean_s = LARGER * 1e-3 * GLOBAL_BATCH * sum(decode_ms) / len(decode_ms)
    there, coming = 1, (math.inf, 1)
    decoded_s = trained_s = waited_s = busy_s = 0.0
    steps, finished, decided_s = 0, [0.0] * WINDOW, 0.0
    for until_s, needs in _ends(PHASES):
        while trained_s < until_s:
            begun_s = max(decoded_s, finished[-WINDOW])
            if coming[0] <= begun_s:
                there, coming = coming[1], (math.inf, 1)
            took_s = next(costs) / there
            decoded_s = begun_s + took_s
            busy_s += took_s
            waited_s += max(0.0, decoded_s - trained_s)
            trained_s = max(decoded_s, trained_s) + mean_s / needs
            finished = [*finished[1:], trained_s]
            steps += 1
            if trained_s - decided_s < INTERVAL_S:
                continue
            passed_s = trained_s - decided_s
            measured = Load(
                preprocessors=there,
                busy=there * min(1.0, busy_s / passed_s),
                wait=waited_s / passed_s,
                helps=True,
                begins=False,
                samples_per_s=GLOBAL_BATCH * steps / passed_s,
                why="",
            )
            wanted = scaling.decide(measured, trained_s).wanted
            if wanted != there and coming[0] == math.inf:
                coming = trained_s + (COMES_AFTER_S if wanted > there else GOES_AFTER_S), wanted
            run.decisions.append((trained_s, wanted, needs))
            run.waits.append((trained_s, measured.wait))
            decided_s, waited_s, busy_s, steps = trained_s, 0.0, 0.0, 0
    for after_s in itertools.takewhile(lambda seconds: seconds <= 2 * COOL_DOWN_S, itertools.count(INTERVAL_S, INTERVAL_S)):
        idle = load(there, busy=0.0, helps=False, samples_per_s=0.0)
        run.gone.append(scaling.decide(idle, trained_s + after_s).wanted)
        there = run.gone[-1]
    return run


def _ends(phases: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    end_s = 0.0
    for seconds, needs in phases:
        end_s += seconds
        yield end_s, needs


@pytest.fixture(scope="module", params=RECORDED)
def run(request: pytest.FixtureRequest) -> Run:
    return simulated(RECORDED[request.param])


def test_the_rate_of_the_trainer_is_reached_within_three_decisions(run: Run) -> None:
    for _, needs in PHASES[:2]:
        numbers = [wanted for _, wanted, needed_then in run.decisions if needed_then == needs]
        changes = [wanted for wanted, _ in itertools.groupby(numbers)]
        assert next(index for index, wanted in enumerate(changes) if wanted >= needs) <= 3
        assert max(numbers) <= 1.5 * needs


def test_the_number_goes_up_and_then_down_and_no_other_way(run: Run) -> None:
    reversals = sum(before != after for before, after in itertools.pairwise(run.directions))
    assert run.directions[0] == 1
    assert reversals <= 1


def test_the_trainer_hardly_waits_once_its_preprocessors_are_there(run: Run) -> None:
    for end_s, _ in _ends(PHASES):
        late = [wait for at_s, wait in run.waits if end_s - 1200 < at_s <= end_s]
        assert sum(late) / len(late) < WAITS


def test_no_more_are_kept_than_the_trainer_takes_from(run: Run) -> None:
    last = run.decisions[-1][1]
    assert last <= math.ceil(1.5 * PHASES[-1][1])


def test_the_fewest_are_kept_once_the_trainer_has_gone_and_not_before_the_cool_down(run: Run) -> None:
    last = run.decisions[-1][1]
    assert run.gone[0] == last
    assert run.gone[-1] == 1
    assert len(list(itertools.takewhile(lambda wanted: wanted == last, run.gone))) >= COOL_DOWN_S / INTERVAL_S - 2


def test_the_last_preprocessor_is_not_said_to_be_kept_for_what_was_never_tried() -> None:
    assert policy().decide(load(1, busy=0.0), 0.0).why == "because"
