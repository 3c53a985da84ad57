"""The simulator against arithmetic done by hand."""

from collections.abc import Mapping

import numpy as np
import pytest

from headrace.reorder_service.planning.batch import Batch, Slots
from headrace.reorder_service.planning.simulation.simulator import Timeline, Work, peak_memory, simulate, timeline
from headrace.reorder_service.planning.simulation.work import lower_bound
from tests.unit.reorder_service.planning.simulator_world import batch_of, keys_of


def equal(stages: Mapping[str, int], *, microbatches: int, replicas: int = 1, **execution: object) -> tuple[Batch, Slots]:
    """One sample per microbatch that takes a second per stage of every unit."""
    count = replicas * microbatches
    costs = {unit: [float(size)] * count for unit, size in stages.items()}
    batch = batch_of(costs, stages, replicas=replicas, microbatches=microbatches, **execution)
    return batch, np.tile(np.arange(count), (len(stages), 1))


def rows(actions: Timeline) -> list[tuple[int, str, float, float]]:
    """(stage, action, start, end)"""
    columns = zip(actions.stage, actions.kind, actions.microbatch, actions.start_s, actions.end_s, strict=True)
    return [(int(s), f"{'FB'[kind]}{m}", float(start), float(end)) for s, kind, m, start, end in columns]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 9])
def test_equal_microbatches_take_microbatches_plus_stages_minus_one_rounds(num_stages: int, microbatches: int) -> None:
    predicted = simulate(Work.of(*equal({"llm": num_stages}, microbatches=microbatches, replicas=2)))
    rounds = microbatches + num_stages - 1
    assert predicted.iteration_s == pytest.approx(3 * rounds)
    assert predicted.bubble == pytest.approx((num_stages - 1) / rounds)
    assert predicted.lower_bound_s == max(3 * microbatches, 3 * num_stages)


def test_two_stages_by_hand() -> None:
    batch = batch_of({"encoder": [1, 2], "llm": [1, 3]}, {"encoder": 1, "llm": 1}, microbatches=2)
    work = Work.of(batch, np.array([[0, 1], [0, 1]]))
    actions = timeline(work)
    assert rows(actions) == [
        (0, "F0", 0, 1), (0, "F1", 1, 3), (0, "B0", 4, 6), (0, "B1", 13, 17),
        (1, "F0", 1, 2), (1, "B0", 2, 4), (1, "F1", 4, 7), (1, "B1", 7, 13),
    ]  # fmt: skip
    assert actions.critical.tolist() == [True, False, False, True, True, True, True, True]
    predicted = simulate(work)
    assert predicted.iteration_s == 17
    assert predicted.lower_bound_s == 15  # sample 1: there and back, 3 * (2 + 3); the llm's work is 3 * 4
    assert predicted.bubble == pytest.approx(1 - (9 + 12) / (2 * 17))


def test_encoders_run_side_by_side_and_the_llm_waits_for_the_slower_one() -> None:
    batch = batch_of({"vision": [4], "audio": [1], "llm": [2]}, {"vision": 2, "audio": 1, "llm": 1}, microbatches=1)
    work = Work.of(batch, np.zeros((3, 1), np.int64))
    assert rows(timeline(work)) == [
        (0, "F0", 0, 2), (0, "B0", 14, 18),
        (1, "F0", 2, 4), (1, "B0", 10, 14),
        (2, "F0", 0, 1), (2, "B0", 10, 12),
        (3, "F0", 4, 6), (3, "B0", 6, 10),
    ]  # fmt: skip
    assert simulate(work).iteration_s == lower_bound(batch) == 18
    assert not timeline(work).critical[4:6].any()


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    batch = batch_of(
        {"encoder": [1.0], "llm": [2.0]}, {"encoder": 1, "llm": 2}, microbatches=1, bytes_={"encoder": [8], "llm": [2]},
        latency_s=0.5, bytes_per_s=4.0,
    )  # fmt: skip
    assert rows(timeline(Work.of(batch, np.zeros((2, 1), np.int64)))) == [
        (0, "F0", 0, 1), (0, "B0", 14, 16),
        (1, "F0", 3.5, 4.5), (1, "B0", 9.5, 11.5),
        (2, "F0", 5.5, 6.5), (2, "B0", 6.5, 8.5),
    ]  # fmt: skip


def test_nothing_is_sent_back_to_a_frozen_encoder_and_it_keeps_nothing() -> None:
    batch = batch_of(
        {"encoder": [1.0], "llm": [1.0]},
        {"encoder": 1, "llm": 1},
        microbatches=1,
        latency_s=0.5,
        backward_factors={"encoder": 0.0},
    )
    work = Work.of(batch, np.zeros((2, 1), np.int64))
    assert simulate(work).iteration_s == 1 + 0.5 + 1 + 2
    assert peak_memory(work).tolist() == [[0, 1]]


def test_the_slowest_replica_decides_and_the_others_wait_for_it() -> None:
    predicted = simulate(Work.of(batch_of({"llm": [1, 3]}, {"llm": 1}, replicas=2, microbatches=1), np.array([[0, 1]])))
    assert (predicted.iteration_s, predicted.lower_bound_s) == (9, 9)
    assert predicted.bubble == pytest.approx(1 - 12 / 18)


def test_a_deferred_sample_goes_back_apart_from_its_microbatch_or_holds_it_up() -> None:
    # Two samples are encoded in microbatch 0, the second goes through the llm in microbatch 1. The first does not wait for it.
    costs, slots = {"encoder": [1.0, 1.0], "llm": [1.0, 1.0]}, np.array([[0, 0], [0, 1]])
    stages = {"encoder": 1, "llm": 1}
    split = rows(timeline(Work.of(batch_of(costs, stages, microbatches=2), slots)))
    assert split == [
        (0, "F0", 0, 2), (0, "F1", 2, 2), (0, "B0", 4, 6), (0, "B1", 7, 9),
        (1, "F0", 1, 2), (1, "B0", 2, 4), (1, "F1", 4, 5), (1, "B1", 5, 7),
    ]  # fmt: skip
    whole = rows(timeline(Work.of(batch_of(costs, stages, microbatches=2, split_backward=False), slots)))
    assert whole[:4] == [(0, "F0", 0, 2), (0, "F1", 2, 2), (0, "B0", 8, 12), (0, "B1", 12, 12)]


def test_deferral_beyond_the_warm_up_needs_split_backward() -> None:
    # Without it the encoder's first backward needs the llm's third, which needs a forward that the encoder runs only after it.
    costs, slots = {"encoder": [1.0] * 3, "llm": [1.0] * 3}, np.array([[0, 1, 2], [2, 1, 2]])
    stages = {"encoder": 1, "llm": 1}
    whole = Work.of(batch_of(costs, stages, microbatches=3, split_backward=False), slots)
    for act in (simulate, timeline):
        with pytest.raises(ValueError, match=r"makes schedule '1f1b' wait for itself.*split the backward"):
            act(whole)
    ahead = Work.of(batch_of(costs, stages, microbatches=3, split_backward=False, schedule="eager"), slots)
    assert simulate(ahead).iteration_s > 0
    assert simulate(Work.of(batch_of(costs, stages, microbatches=3), slots)).iteration_s > 0


def test_a_microbatch_waits_for_the_replica_that_encoded_its_samples() -> None:
    # Replica 1 encodes both samples, one after the other in one microbatch; the llm's halves run one on each replica.
    batch = batch_of({"encoder": [2.0, 3.0], "llm": [1.0, 1.0]}, {"encoder": 1, "llm": 1}, replicas=2, microbatches=2)
    actions = timeline(Work.of(batch, np.array([[2, 2], [0, 2]])))
    assert rows(actions) == [
        (0, "F0", 0, 0), (0, "B0", 0, 0), (1, "F0", 5, 6), (1, "B0", 6, 8),
        (0, "F0", 0, 5), (0, "B0", 8, 18), (1, "F0", 5, 6), (1, "B0", 6, 8),
    ]  # fmt: skip
    assert actions.replica.tolist() == [0] * 4 + [1] * 4


def test_empty_microbatches_are_left_out_wherever_they_stand() -> None:
    stages = {"encoder": 1, "llm": 2}
    costs = {"encoder": [1.0, 2.0, 3.0], "llm": [3.0, 1.0, 2.0]}
    full = Work.of(batch_of(costs, stages, microbatches=3), np.tile([0, 1, 2], (2, 1)))
    holes = Work.of(batch_of(costs, stages, microbatches=6), np.tile([0, 2, 5], (2, 1)))
    assert simulate(holes) == simulate(full)
    assert set(timeline(holes).microbatch) == {0, 2, 5}


def test_a_microbatch_that_is_empty_in_one_unit_is_an_action_without_length() -> None:
    batch = batch_of({"encoder": [1.0, 1.0], "llm": [1.0, 1.0]}, {"encoder": 1, "llm": 1}, microbatches=2)
    actions = timeline(Work.of(batch, np.array([[0, 0], [1, 1]])))
    lengths = dict(zip(keys_of(actions), (actions.end_s - actions.start_s).tolist(), strict=True))
    assert lengths[0, 0, 0, 0, 0] == lengths[0, 1, 0, 1, 0] == 2
    assert lengths[0, 0, 0, 1, 0] == lengths[0, 1, 0, 0, 0] == 0


def test_a_replica_without_samples_and_work_without_length_take_no_time() -> None:
    batch = batch_of({"llm": [0.0]}, {"llm": 2}, replicas=2, microbatches=3)
    work = Work.of(batch, np.array([[3]]))
    predicted = simulate(work)
    assert (predicted.iteration_s, predicted.bubble, predicted.lower_bound_s) == (0, 0, 0)
    assert set(timeline(work).replica) == {1}
    assert peak_memory(work).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("1f1b", [7, 6, 6, 5, 4, 3, 2, 1]),
        ("gpipe", [9] * 8),
        ("eager", [9] * 7 + [1]),
        ("interleaved", [7, 6, 6, 5, 4, 3, 2, 1]),
        ("zero-bubble", [7] * 8),
    ],
)
def test_peak_memory_counts_the_microbatches_in_flight(schedule: str, expected: list[int]) -> None:
    batch, slots = equal({"vision": 2, "audio": 1, "llm": 5}, microbatches=9, schedule=schedule)
    assert peak_memory(Work.of(batch, slots)).tolist() == [expected]


def test_a_deferred_sample_keeps_its_part_until_its_own_backward() -> None:
    costs, memory = {"encoder": [1.0] * 3, "llm": [1.0] * 3}, {"encoder": [4.0, 8.0, 1.0], "llm": [1.0, 1.0, 1.0]}
    batch = batch_of(costs, {"encoder": 1, "llm": 1}, microbatches=3, memory=memory)
    actions = timeline(Work.of(batch, np.array([[0, 0, 1], [0, 2, 1]])))
    encoder = actions.stage == 0
    assert actions.kind[encoder].tolist() == [0, 0, 1, 0, 1, 1]
    assert actions.memory_after[encoder].tolist() == [12, 13, 9, 9, 8, 0]


def test_the_lower_bound_is_the_busiest_unit_or_the_longest_sample() -> None:
    stages = {"vision": 1, "audio": 1, "llm": 4}
    busy = batch_of({"vision": [9.0] * 8, "audio": [1.0] * 8, "llm": [1.0] * 8}, stages, replicas=2, microbatches=4)
    assert lower_bound(busy) == 3 * 72 / 2
    long = batch_of(
        {"vision": [2.0], "audio": [3.0], "llm": [4.0]}, stages, replicas=2, microbatches=4, backward_factors={"llm": 1.0}
    )
    assert lower_bound(long) == 3 * 3 + 2 * 4
