"""Which samples each step of a job has is the same whenever its shards are counted, and few are for the first steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import JobFailedError
from headrace.manifest import UNCOUNTED, ShardInfo, ShardTable
from headrace.reorder_service.jobs.batches import Changes, GlobalBatches
from headrace.reorder_service.jobs.counted_shards import CountedShards
from headrace.spec import parse_spec
from tests.examples import with_examples

Rows = list[list[int]]


class Counted:
    """Batches of a job whose shards hold the given rows: all counted, or none at first."""

    def __init__(self, rows: Rows, *, counted: bool, changes: Changes = (), weights: Any = None, **fields: Any) -> None:
        sources = [{"path": f"/d/{n}", "weight": weights[n] if weights else None} for n in range(len(rows))]
        spec = parse_spec({"name": "job", "sources": sources} | fields)
        numbers = (s for s, of_source in enumerate(rows) for _ in of_source)
        infos = ShardTable.of(ShardInfo(source=s, url=f"/d/{s}/x", name=f"{s}/x") for s in numbers)
        self.rows = np.array([count for of_source in rows for count in of_source])
        self.manifest = CountedShards(spec, infos, self.rows if counted else np.full(len(self.rows), UNCOUNTED))
        self.batches = GlobalBatches(spec, self.manifest, changes)
        self.batches.set_up_order()

    def count(self, *shards: int) -> None:
        self.manifest.num_rows[list(shards)] = self.rows[list(shards)]

    def count_for(self, step: int) -> int:
        """Count what the batches ask for, until it asks for no more; how many shards that were."""
        before = self.manifest.num_counted
        while shards := self.batches.to_count(step):
            self.count(*shards)
        return self.manifest.num_counted - before


def lazy(rows: Rows, **fields: Any) -> Counted:
    return Counted(rows, counted=False, **fields)


some_rows = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any), min_size=1, max_size=3)


@with_examples(100)
@given(some_rows, st.data())
def test_the_order_is_the_same_whenever_shards_are_counted_and_the_job_ends_where_it_did(rows: Rows, data: st.DataObject) -> None:
    some_weights = st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=len(rows), max_size=len(rows))
    later_weights = st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0]), min_size=len(rows), max_size=len(rows)).filter(any)
    fields = data.draw(st.sampled_from([{"epochs": 1}, {"epochs": 3}, {"steps": 5}, {"steps": 5, "epochs": 1}]))
    fields = fields | {
        "weights": data.draw(st.none() | some_weights),
        "changes": data.draw(st.just(()) | st.tuples(st.tuples(st.integers(0, 4), later_weights.map(tuple)))),
        "global_batch": data.draw(st.integers(1, 12)),
        "shuffle_shards": data.draw(st.integers(1, 4)),
        "seed": data.draw(st.integers(0, 99)),
    }
    eager, growing = Counted(rows, counted=True, **fields), lazy(rows, **fields)
    chance, step = np.random.default_rng(data.draw(st.integers(0, 99))), 0
    while True:
        while wanted := growing.batches.to_count(step):
            assert all(growing.manifest.num_rows[wanted] == UNCOUNTED)
            ahead = growing.batches.to_count(step, ahead=1)
            assert set(wanted) <= set(ahead)
            growing.count(*chance.choice(ahead, size=5))
        if not growing.batches.knows(step):
            break
        assert growing.batches.refs(step) == eager.batches.refs(step)
        assert growing.batches.num_steps in (0, eager.batches.num_steps)
        step += 1
    assert (step, growing.batches.num_steps) == (eager.batches.num_steps, eager.batches.num_steps)


def test_the_first_step_needs_one_block_of_shards_and_the_others_follow_one_by_one() -> None:
    job = lazy([[10] * 12], global_batch=10, shuffle_shards=3)
    eager = Counted([[10] * 12], counted=True, global_batch=10, shuffle_shards=3)
    blocks = [{ref.shard for step in range(3 * n, 3 * n + 3) for ref in eager.batches.refs(step)} for n in range(4)]
    assert set(job.batches.to_count(0)) == blocks[0]
    assert set(job.batches.to_count(0, ahead=2)) == blocks[0] | blocks[1] | blocks[2]
    assert [job.count_for(step) for step in range(12)] == [3, 0, 3, 0, 0, 3, 0, 0, 3, 0, 0, 0]
    assert job.batches.num_steps == 12


def test_of_weighted_sources_each_is_counted_as_it_comes() -> None:
    job = lazy([[5] * 40, [5] * 40], weights=[9.0, 1.0], global_batch=10, shuffle_shards=2)
    assert job.count_for(0) == 2 + 2
    assert job.count_for(9) > 0
    counted = job.manifest.num_rows.reshape(2, 40) != UNCOUNTED
    assert counted.sum(axis=1).tolist() == [18, 4]


def test_sources_that_mix_by_their_sizes_are_counted_wholly_first() -> None:
    job = lazy([[5] * 30, [1] * 30], global_batch=4, shuffle_shards=2)
    assert job.count_for(0) == 60
    assert job.batches.num_steps == 45


def test_steps_alone_end_a_job_that_nothing_is_counted_of() -> None:
    job = lazy([[5] * 30], global_batch=10, steps=7)
    assert (job.batches.num_steps, job.manifest.num_counted) == (7, 0)


def test_steps_within_the_epochs_end_a_job_once_the_last_of_them_is_known() -> None:
    job = lazy([[5] * 30], global_batch=10, shuffle_shards=2, steps=7, epochs=1)
    assert job.batches.num_steps == 0
    assert job.count_for(6) == 16
    assert job.batches.num_steps == 7


def test_epochs_end_a_job_when_the_last_shard_is_counted() -> None:
    job = lazy([[5] * 7 + [0] * 3], global_batch=10, shuffle_shards=2)
    steps = [job.count_for(step) and job.batches.num_steps for step in range(4)]
    assert job.batches.num_steps == 4
    assert steps[0] == 0
    assert job.manifest.num_counted == 10


def test_a_source_without_samples_is_told_when_its_last_shard_is_counted() -> None:
    job = lazy([[0] * 9], shuffle_shards=2)
    with pytest.raises(JobFailedError, match=r"source '0' has no usable sample: \S+ has no row, and 8 more shards have no row; "):
        job.count_for(0)
    assert job.manifest.num_counted == 9
