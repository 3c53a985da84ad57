"""Who takes a work: the arrays choose whom a look at one member after another would."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.fleet.roster import FAMILIARITY, NEARNESS, Reading, Roster

SHARDS = [("job", shard) for shard in range(4)]

members = st.lists(
    st.tuples(st.integers(1, 6), st.integers(-2, 6), st.sets(st.sampled_from(SHARDS))),  # slots, free, read
    min_size=1,
    max_size=20,
)
works = st.dictionaries(st.sampled_from(SHARDS), st.integers(1, 8))
probed = st.dictionaries(st.integers(0, 19), st.integers(1, 8), max_size=3)


@given(members, works, probed, st.sets(st.integers(0, 19), max_size=4), st.booleans())
def test_the_choice_is_that_of_the_slow_twin(
    members: list[tuple[int, int, set[tuple[str, int]]]],
    work: dict[tuple[str, int], int],
    probed: dict[int, int],
    avoid: set[int],
    without_slot: bool,
) -> None:
    roster = Roster()
    rows = []
    for number, (slots, free, shards) in enumerate(members):
        rows.append(roster.add(f"{number:02d}", slots))
        roster.note(rows[-1], shards)
        roster.set_free(rows[-1], free, keep=True)
    avoid = {number for number in avoid if number < len(members)}
    if len(avoid) == len(members):
        avoid = set()

    num_samples = max(1, sum(work.values()))

    def nearness(number: int) -> float:
        read = sum(count for shard, count in work.items() if shard in members[number][2])
        return (NEARNESS * read + FAMILIARITY * probed.get(number, 0)) / num_samples

    def score(number: int) -> tuple[float, int]:
        slots, free, _ = members[number]
        return round(free + slots * nearness(number), 6), number

    candidates = [number for number in range(len(members)) if number not in avoid]
    with_slot = [number for number in candidates if members[number][1] > 0]
    expected = max(with_slot or (candidates if without_slot else []), key=score, default=None)
    reading = Reading(num_samples, work, {rows[number]: count for number, count in probed.items() if number < len(rows)})
    chosen = roster.choose(reading, {rows[number] for number in avoid}, keep=True, most_over=inf if without_slot else 0.0)
    assert chosen == (rows[expected] if expected is not None else None)
    with_free = [number for number, (_, free, _) in enumerate(members) if free > 0]
    assert roster.has_free(keep=True) == bool(with_free)
    assert roster.only_free(keep=True) == (rows[with_free[0]] if len(with_free) == 1 else None)
    assert [roster.nearness(row, reading) for row in rows] == pytest.approx([nearness(number) for number in range(len(rows))])


def test_who_leaves_is_not_chosen_and_leaves_no_trace_for_who_comes() -> None:
    roster = Roster()
    first = roster.add("a", 2)
    roster.note(first, SHARDS)
    roster.set_free(first, 2, keep=True)
    roster.remove(first, SHARDS)
    assert not roster.has_free(keep=True)
    second, third = roster.add("b", 2), roster.add("c", 2)
    for row in (second, third):
        roster.set_free(row, 2, keep=True)
    assert roster.choose(Reading(1, {SHARDS[0]: 1}), (), keep=True) == third


def test_members_take_turns_at_each_kind_of_work() -> None:
    roster = Roster()
    for name in "abc":
        row = roster.add(name, 2)
        for keep in (False, True):
            roster.set_free(row, 2, keep=keep)
    chosen = []
    for keep in (True, True, False, True, False, False, True):
        row = roster.choose(Reading(1, {}), (), keep=keep)
        assert row is not None
        roster.served(row, keep=keep)
        chosen.append((keep, row))
    of_kind = {keep: [row for kind, row in chosen if kind is keep] for keep in (False, True)}
    assert len(set(of_kind[False])) == len(set(of_kind[True][:3])) == 3
    assert of_kind[True][3] == of_kind[True][0]
