"""Packing: the kernel against its slow twin, the bound that the literature proves, and batches of packs."""

import os
import time
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import Topology
from headrace.reorder_service.planning.batch import Batch, make_batch
from headrace.reorder_service.planning.packing import MOST_CAPACITY, pack, pack_batch, plan_of_samples, unpack
from headrace.reorder_service.planning.strategies import plan_of
from tests.examples import with_examples

interpreted = os.environ.get("NUMBA_DISABLE_JIT") == "1"


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths that share a few values or fill a pack exactly are where ties lie."""
    capacity = draw(st.integers(1, 40))
    return draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60)), capacity


def run(lengths: list[int], capacity: int) -> list[int]:
    return pack(np.array(lengths), capacity).tolist()


def slow_best_fit(lengths: list[int], capacity: int) -> list[int]:
    room: list[int] = []
    opened = [-1] * len(lengths)
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [p for p in range(len(room)) if room[p] >= lengths[row]]
        chosen = min(fitting, key=lambda p: (room[p], p), default=len(room))
        if chosen == len(room):
            room.append(capacity)
        room[chosen] -= lengths[row]
        opened[row] = chosen
    by_first_row = list(dict.fromkeys(opened))
    return [by_first_row.index(p) for p in opened]


def fewest_packs(lengths: list[int], capacity: int) -> int:
    """By trying every pack for every sample, from long to short."""
    ordered = sorted(lengths, reverse=True)

    def fits(row: int, room: list[int]) -> bool:
        if row == len(ordered):
            return True
        for p in {amount: p for p, amount in enumerate(room)}.values():  # equal rooms need one try
            if room[p] >= ordered[row]:
                room[p] -= ordered[row]
                if fits(row + 1, room):
                    return True
                room[p] += ordered[row]
        return False

    return next(count for count in range(1, len(lengths) + 1) if fits(0, [capacity] * count))


def batch_of(costs: dict[str, list[float]], ids: list[int] | None = None, **columns: dict[str, np.ndarray]) -> Batch:
    num_samples = len(costs["llm"])
    topology = Topology(replicas=2, microbatches=2, stages=dict.fromkeys(costs, 1))
    arrays = {unit: np.array(values, np.float64) for unit, values in costs.items()}
    return make_batch(np.array(ids or range(num_samples)), arrays, topology, seed=0, **columns)


# -- pack --------------------------------------------------------------------------------------------------------------


@given(instances())
def test_the_tree_takes_the_same_packs_as_a_linear_search(instance: tuple[list[int], int]) -> None:
    assert run(*instance) == slow_best_fit(*instance)


@pytest.mark.parametrize("capacity", [63, 64, 65, 1000, 4096])
def test_the_tree_takes_the_same_packs_at_the_edges_of_its_size(capacity: int) -> None:
    lengths = np.clip(np.random.default_rng(capacity).lognormal(4, 1.5, 400), 1, capacity).astype(np.int64).tolist()
    assert run(lengths, capacity) == slow_best_fit(lengths, capacity)


@given(instances())
def test_no_pack_is_too_long_and_packs_are_numbered_by_their_first_rows(instance: tuple[list[int], int]) -> None:
    lengths, capacity = instance
    packs = run(lengths, capacity)
    assert np.bincount(packs, weights=lengths).max() <= capacity
    assert list(dict.fromkeys(packs)) == list(range(max(packs) + 1))


@with_examples(60)
@given(st.integers(5, 30).flatmap(lambda c: st.tuples(st.lists(st.integers(1, c), min_size=1, max_size=10), st.just(c))))
def test_the_number_of_packs_is_within_the_bound_of_the_optimum(instance: tuple[list[int], int]) -> None:
    assert max(run(*instance)) + 1 <= 11 / 9 * fewest_packs(*instance) + 4


def test_no_two_packs_could_have_been_one() -> None:
    """A pack is opened for a sample only where it fits no other, so all but one are more than half full."""
    lengths = np.random.default_rng(0).integers(1, 512, 3000)
    filled = np.bincount(pack(lengths, 1024), weights=lengths)
    assert np.sort(filled)[:2].sum() > 1024


def test_the_fullest_pack_that_fits_is_taken() -> None:
    assert run([7, 6, 3, 4], 10) == [0, 1, 0, 1]  # 4 fits only the 6, and 3 then fills the 7


def test_equal_samples_and_packs_are_taken_in_order() -> None:
    assert run([5, 5, 5, 5], 10) == [0, 0, 1, 1]
    assert run([6, 6, 6, 3], 10) == [0, 1, 2, 0]


def test_a_sample_as_long_as_a_pack_has_one_to_itself() -> None:
    assert run([10, 1, 10, 9], 10) == [0, 1, 2, 1]


def test_one_sample_and_none() -> None:
    assert run([3], 3) == [0]
    assert pack(np.zeros(0, np.int64), 8).tolist() == []


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64])
def test_any_integers_will_do(dtype: type[np.integer]) -> None:
    assert pack(np.array([700, 300, 600], dtype), 1000).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        ([5, 11], 10, "every sample must have 1 to 10 tokens to be packed, but row 1 has 11"),
        ([5, 0, -1], 10, "every sample must have 1 to 10 tokens to be packed, but row 1 has 0"),
        ([5], 0, f"must be from 1 to {MOST_CAPACITY} tokens, got 0"),
        ([5], MOST_CAPACITY + 1, f"must be from 1 to {MOST_CAPACITY} tokens, got {MOST_CAPACITY + 1}"),
        ([1.5], 10, "must be a list of integers, got .* of float64"),
        ([[1, 2]], 10, r"must be a list of integers, got shape \(1, 2\)"),
    ],
)
def test_lengths_that_cannot_be_packed_are_refused(lengths: list[int], capacity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(np.array(lengths), capacity)


@pytest.mark.skipif(interpreted, reason="speed of compiled code")
def test_a_million_samples_are_packed_in_a_second() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.2, 1 << 20), 1, 8192).astype(np.int64)
    pack(lengths[:100], 8192)
    start = time.process_time()
    packs = pack(lengths, 8192)
    assert time.process_time() - start < 1.0
    assert packs.max() + 1 <= 1.001 * lengths.sum() / 8192


# -- batches of packs --------------------------------------------------------------------------------------------------


def test_costs_add_up_but_the_llm_pays_for_the_whole_length() -> None:
    batch = batch_of(
        {"encoder": [1, 2, 4, 8], "llm": [6, 5, 4, 3], "generator": [1, 1, 1, 5]},
        ids=[40, 30, 20, 10],
        memory={"encoder": np.arange(4.0), "llm": np.full(4, 9.0), "generator": np.ones(4)},
        transfer_bytes={"encoder": np.ones(4), "llm": np.full(4, 18.0), "generator": np.zeros(4)},
    )
    packed, packs = pack_batch(batch, np.array([6, 5, 4, 3]), 10, padded=True)
    assert packs.tolist() == [0, 1, 0, 1]  # 6 + 4 and 5 + 3 of 10
    assert packed.sample_ids.tolist() == [40, 30]
    assert packed.costs.tolist() == [[5, 10], [10, 10], [2, 6]]  # 18 seconds for 18 tokens: 10 for 10
    assert packed.memory.tolist() == [[2, 4], [20, 20], [2, 2]]
    assert packed.transfer_bytes.tolist() == [[2, 2], [40, 40], [0, 0]]
    assert packed.costs.flags.c_contiguous
    assert (packed.topology, packed.seed, packed.execution) == (batch.topology, batch.seed, batch.execution)


def test_without_padding_costs_add_up_in_the_llm_too() -> None:
    ones = {"encoder": np.ones(4), "llm": np.full(4, 9.0)}
    batch = batch_of({"encoder": [1, 2, 4, 8], "llm": [6, 5, 4, 3]}, memory=ones, transfer_bytes=ones)
    packed, _ = pack_batch(batch, np.array([6, 5, 4, 3]), 10, padded=False)
    assert packed.costs.tolist() == [[5, 10], [10, 8]]
    assert packed.memory.tolist() == packed.transfer_bytes.tolist() == [[2, 2], [18, 18]]
    assert packed.tokens is not None
    assert packed.tokens.tolist() == [10, 8]


@given(instances(), st.integers(0, 2**32 - 1), st.sampled_from(["random", "disttrain", "entrain", "orchmllm"]))
def test_in_a_plan_samples_of_a_pack_follow_each_other_in_their_order(
    instance: tuple[list[int], int], seed: int, strategy: str
) -> None:
    lengths, capacity = instance
    costs = np.random.default_rng(seed).random(len(lengths))
    ids = list(range(3, 3 + len(lengths)))
    batch = batch_of({"vision": costs.tolist(), "llm": [float(length) for length in lengths]}, ids=ids)
    of_packs, packs = pack_batch(batch, np.array(lengths), capacity, padded=True)
    plan = plan_of_samples(plan_of(strategy, of_packs, 1, None), batch, packs)
    assert plan.sample_ids() == ids
    pack_of = dict(zip(ids, packs.tolist(), strict=True))
    for unit in batch.units:
        seen = [microbatch.units[unit] for replica in plan.replicas for microbatch in replica]
        runs = [list(run) for samples in seen for _, run in groupby(samples, pack_of.__getitem__)]
        assert len(runs) == len(set(packs.tolist())), "no pack is torn apart"
        assert all(run == sorted(run) for run in runs)


@given(instances(), st.integers(0, 2**32 - 1))
def test_every_sample_goes_where_its_pack_goes(instance: tuple[list[int], int], seed: int) -> None:
    lengths, capacity = instance
    rng = np.random.default_rng(seed)
    batch = batch_of({"vision": rng.random(len(lengths)).tolist(), "llm": rng.random(len(lengths)).tolist()})
    packed, packs = pack_batch(batch, np.array(lengths), capacity, padded=True)
    slots_of_packs = rng.integers(0, batch.num_slots, packed.costs.shape)
    slots = unpack(slots_of_packs, packs)
    assert slots.flags.c_contiguous
    for row, own in enumerate(packs):
        assert slots[:, row].tolist() == slots_of_packs[:, own].tolist()
    np.testing.assert_allclose(packed.loads(slots_of_packs)[..., 0], batch.loads(slots)[..., 0], rtol=1e-12)


def test_lengths_of_another_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one value per sample \(2\), got shape \(3,\)"):
        pack_batch(batch_of({"llm": [1, 1]}), np.array([1, 2, 3]), 10, padded=True)
