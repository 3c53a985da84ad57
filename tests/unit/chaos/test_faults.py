"""Faults are drawn from a seed, and the same again."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.transport.base import FLIGHT, TRANSPORTS
from tests.chaos.faults import LAST_STEPS, LASTS_S, MAX_DELAY_S, NAMES, Fault, Kind, draw, seeds

STEPS = 10


def test_a_seed_gives_the_same_round_again() -> None:
    assert draw(7, steps=STEPS) == draw(7, steps=STEPS)
    assert len({draw(seed, steps=STEPS).faults for seed in range(100)}) == 100


def test_the_rounds_from_any_seed_on_can_be_repeated() -> None:
    whole = seeds(3, 20)
    assert whole[0] == 3
    assert seeds(whole[12], 8) == whole[12:]
    assert seeds(whole[5], 1) == [whole[5]]
    assert len(set(whole)) == 20


def test_every_fault_comes_and_mostly_two_at_once() -> None:
    rounds = [draw(seed, steps=STEPS) for seed in range(1000)]
    names = Counter(fault.name for disturbance in rounds for fault in disturbance.faults)
    assert names.keys() == set(NAMES)
    assert min(names.values()) > max(names.values()) / 2
    both = [disturbance for disturbance in rounds if len(disturbance.faults) == 2]
    assert 700 < len(both) < 800
    assert all(len({fault.name for fault in disturbance.faults}) == 2 for disturbance in both)


def test_a_fault_strikes_while_there_is_something_to_strike() -> None:
    for seed in range(300):
        disturbance = draw(seed, steps=STEPS, count=2)
        assert disturbance.transport in TRANSPORTS
        for fault in disturbance.faults:
            assert 0 <= fault.step < STEPS - LAST_STEPS
            assert 0 <= fault.delay_s <= MAX_DELAY_S
            assert LASTS_S[fault.kind][0] <= fault.lasts_s <= LASTS_S[fault.kind][1]
            assert fault.number in (0, 1)
            if fault.target == "rank-preprocessor":
                assert disturbance.transport == FLIGHT, "payload must pass the wire"


@pytest.mark.parametrize(
    ("target", "number", "watched"), [("rank", 1, 1), ("rank-leader", 1, 1), ("rank-preprocessor", 1, 0), ("redis", 1, 0)]
)
def test_a_fault_of_a_rank_follows_its_own_fetch(target: str, number: int, watched: int) -> None:
    kind = Kind.CUT if "-" in target else Kind.KILL
    assert Fault(kind=kind, target=target, number=number, step=0, lasts_s=1.0).watched_rank == watched
