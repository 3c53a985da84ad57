"""What is lost, repeated or mixed up is seen, and told apart."""

from __future__ import annotations

import math

from headrace.ledger import LedgerEntry
from tests.chaos.faults import Fault, Kind
from tests.chaos.verdict import Outcome, Verdict, judge, strike, table


def ledger(*steps: str) -> list[LedgerEntry]:
    """A letter a sample."""
    return [LedgerEntry(step=step, samples=tuple(names), loss=math.nan) for step, names in enumerate(steps)]


RIGHT = ledger("ab", "cd", "ef")
DELIVERED = {(0, 0): [0], (1, 0): [1], (0, 1): [3, 2], (1, 1): [], (0, 2): [4], (1, 2): [5]}
KILL = Fault(kind=Kind.KILL, target="redis", step=1, lasts_s=1.0)


def test_a_ledger_like_the_undisturbed_one_is_good_whatever_the_losses() -> None:
    assert judge(RIGHT, RIGHT, DELIVERED).is_good
    assert judge(RIGHT, [LedgerEntry(step=e.step, samples=e.samples, loss=1.0) for e in RIGHT], DELIVERED).is_good


def test_lost_and_repeated_samples_and_failed_steps() -> None:
    assert judge(RIGHT, ledger("ab", "cd"), DELIVERED) == Verdict(lost=("e", "f"), failed_steps=(2,))
    assert judge(RIGHT, ledger("ab", "ca", "ef"), DELIVERED) == Verdict(lost=("d",), repeated=("a",), failed_steps=(1,))
    assert judge(RIGHT, ledger("cd", "ab", "ef"), DELIVERED) == Verdict(failed_steps=(0, 1)), "right samples at the wrong time"
    assert judge(RIGHT, ledger("ab", "cd", "ef", "ab"), DELIVERED) == Verdict(repeated=("a", "b"), failed_steps=(3,))


def test_what_a_rank_had_counts_as_well() -> None:
    assert judge(RIGHT, RIGHT, DELIVERED | {(1, 1): [2]}) == Verdict(failed_steps=(1,)), "to both ranks"
    assert judge(RIGHT, RIGHT, DELIVERED | {(1, 2): [3]}) == Verdict(failed_steps=(2,)), "of another step"


def test_the_next_commit_is_of_a_step_that_was_not_on_its_way() -> None:
    commits_s = [1.0, 2.0, 3.1, 3.5, 9.0]
    struck = strike(KILL, 3.0, 3, commits_s)
    assert (struck.next_commit_s, struck.longest_s) == (0.5, 5.5)
    assert strike(KILL, 3.0, 5, commits_s).next_commit_s is None


def test_the_table_has_a_line_for_each_kind_that_struck() -> None:
    hang = Fault(kind=Kind.HANG, target="leader", step=1, lasts_s=1.0)
    outcomes = [
        Outcome(struck=(strike(KILL, 0.0, 0, [2.0, 3.0]),), verdict=Verdict()),
        Outcome(
            struck=(strike(KILL, 0.0, 0, [4.0]), strike(hang, 1.0, 0, [4.0])), verdict=Verdict(lost=("a",), failed_steps=(1,))
        ),
    ]
    lines = [line.split() for line in table(outcomes).splitlines()[2:]]
    assert lines == [
        ["kill", "redis", "2", "3.0", "4.0", "4.0", "1", "0", "1"],
        ["hang", "leader", "1", "3.0", "3.0", "3.0", "1", "0", "1"],
    ]
    assert [outcome.is_good for outcome in outcomes] == [True, False]
