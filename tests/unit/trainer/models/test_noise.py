"""Noise by counter: the published numbers, normal values, and nothing that depends on what is drawn beside them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.models.noise import normal, numbers, uniform

SPLITMIX_OF_1234567 = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)
"""The first numbers of SplitMix64 with this seed, as published with implementations of it."""


def test_the_numbers_are_those_of_splitmix64() -> None:
    found = numbers(torch.tensor(1234567), torch.arange(5))
    assert [number % 2**64 for number in found.tolist()] == list(SPLITMIX_OF_1234567)


def test_values_are_normal_and_independent() -> None:
    values = normal(numbers(torch.tensor(7), torch.arange(2000)), 101)
    assert values.shape == (2000, 101)
    assert values.dtype == torch.float32
    assert values.mean().abs() < 0.01
    assert values.std() == pytest.approx(1, abs=0.01)
    assert values.pow(4).mean() == pytest.approx(3, abs=0.1)
    shares = torch.tensor([0.001, 0.1, 0.5, 0.9, 0.999])
    expected = torch.distributions.Normal(0.0, 1.0).icdf(shares)
    torch.testing.assert_close(values.flatten()[:160_000].quantile(shares), expected, atol=0.1, rtol=0)
    correlated = torch.corrcoef(values.T) - torch.eye(101)
    assert correlated.abs().max() < 0.12


def test_no_rows_are_none() -> None:
    assert normal(torch.zeros(0, dtype=torch.int64), 3).shape == (0, 3)


@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), width=st.integers(1, 40))
def test_a_row_follows_from_its_key_alone(keys: list[int], width: int) -> None:
    together = normal(torch.tensor(keys), width)
    assert together.shape == (len(keys), width)
    assert together.isfinite().all()
    for row, key in zip(together, keys, strict=True):
        torch.testing.assert_close(row, normal(torch.tensor([key]), width)[0], atol=1e-6, rtol=0)


def test_uniform_values_lie_from_0_up_to_1() -> None:
    values = uniform(torch.tensor([0, -1, 2**62, -(2**63)]))
    assert values.tolist() == [0.0, 1 - 2**-24, 0.25, 0.5]
