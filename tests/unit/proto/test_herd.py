"""Thousands of clients that lose their service at once come back one after the other; a few come back at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.herd import CALLS_PER_S, MOST_SPREAD_S, retry_pause_s

RETRY_S = 0.2


def arrivals_s(num_clients: int, away_s: float, seed: int) -> list[float]:
    """When each client reaches a service that is away for so long: it tries until then, with a pause before each try."""
    rng = random.Random(seed)
    found: list[float] = []
    for _ in range(num_clients):
        now_s = 0.0
        while now_s < away_s:
            now_s += retry_pause_s(RETRY_S, num_clients, rng.random())
        found.append(now_s - away_s)
    return sorted(found)


@pytest.mark.parametrize("away_s", [1e-9, 1.7, 30.0])
def test_ten_thousand_clients_come_over_some_seconds_and_the_first_at_once(away_s: float) -> None:
    found = arrivals_s(10_000, away_s, seed=7)
    assert found[0] < 0.3
    assert found[100] < 1.0
    assert found[-1] <= RETRY_S + MOST_SPREAD_S
    busiest = max(sum(start <= at < start + 1 for at in found) for start in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0))
    assert busiest < 2.2 * CALLS_PER_S


@given(st.integers(1, 64), st.floats(0, 1))
def test_a_few_clients_wait_hardly_longer_than_their_pause(num_clients: int, draw: float) -> None:
    assert RETRY_S <= retry_pause_s(RETRY_S, num_clients, draw) <= RETRY_S + 0.05


@given(st.integers(1, 10**7), st.floats(0, 1))
def test_no_client_waits_for_much_longer(num_clients: int, draw: float) -> None:
    assert retry_pause_s(RETRY_S, num_clients, draw) <= RETRY_S + MOST_SPREAD_S
