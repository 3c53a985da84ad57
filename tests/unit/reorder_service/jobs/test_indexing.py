"""A job over many shards: it begins when the first are counted, counts each once, and few ahead of its window."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from headrace.manifest import UNCOUNTED
from headrace.reorder_service.jobs.indexing import BLOCKS_AHEAD
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.service import ReorderService
from headrace.v1 import common_pb2, fleet_pb2
from tests.unit.reorder_service.job_world import Preprocessor, Start, consume, names, submit, told_step, until

SHARDS, ROWS, BLOCK = 24, 3, 2


@dataclass(kw_only=True)
class Archivist(Preprocessor):
    """One source of SHARDS shards, of ROWS rows each."""

    silent: frozenset[int] = frozenset()
    """Shards that are never counted."""
    counted: list[int] = field(default_factory=list)
    unprobed: bool = False
    """Whether it answers no order to probe."""
    asked_to_probe: bool = False

    def _hear(self, order: fleet_pb2.FleetOrder) -> None:
        if order.WhichOneof("order") == "probe_samples":
            self.asked_to_probe = True
            if self.unprobed:
                return
        if order.WhichOneof("order") == "index_shard" and order.index_shard.shard.number in self.silent:
            return
        super()._hear(order)

    def _result(self, kind: str, body: Any) -> Any:
        match kind:
            case "list_shards":
                shards = [common_pb2.Shard(number=n, url=f"/d/{n}", name=f"d/{n}") for n in range(SHARDS)]
                return fleet_pb2.ShardsListed(shards=shards, vocabulary=common_pb2.Vocabulary(size=9))
            case "index_shard":
                self.counted.append(body.shard.number)
                return fleet_pb2.ShardIndexed(num_samples=ROWS)
            case "probe_samples":
                shard_names = {shard.number: shard.name for shard in body.shards}
                probes = [
                    common_pb2.Probe(sample_id=s.sample_id, name=f"{shard_names[s.shard]}/{s.row}", num_tokens=4, num_targets=2)
                    for s in body.samples
                ]
                return fleet_pb2.SamplesProbed(probes=probes)
            case "decode_part":
                assert {shard.number for shard in body.shards} == {sample.shard for sample in body.samples}
        return super()._result(kind, body)


async def begin(service: ReorderService, archivist: Archivist, **fields: Any) -> JobRun:
    archivist.join()
    run = await submit(service, join=False, shuffle_shards=BLOCK, **fields)
    await run.wait_ready()
    return run


async def test_the_first_step_is_committed_when_few_shards_are_counted(start: Start) -> None:
    service = await start()
    archivist = Archivist(service=service)
    run = await begin(service, archivist)
    assert await consume(run, run.open_session(0, 1), stop=1) == [0]
    assert run.cursor.num_steps == 0
    needed = -(-(1 + run.spec.window) * run.spec.global_batch // ROWS)  # of the window
    assert len(archivist.counted) <= needed + BLOCK * (BLOCKS_AHEAD + 1)
    assert await consume(run, run.open_session(0, 1)) == list(range(1, 18))
    assert (run.cursor.state, run.cursor.num_steps, run.manifest.num_counted) == ("DONE", 18, SHARDS)
    assert sorted(archivist.counted) == list(range(SHARDS))
    ledger = Counter(name for step in await names(run) for name in step)
    assert ledger == Counter(f"d/{shard}/{row}" for shard in range(SHARDS) for row in range(ROWS))


async def test_who_takes_over_counts_only_what_is_not_counted(start: Start) -> None:
    service = await start()
    archivist = Archivist(service=service)
    run = await begin(service, archivist, epochs=2)
    known: set[int] = set()
    for stop in (2, 9, 20, None):
        await consume(run, run.open_session(0, 1), stop=stop)
        assert not known & set(archivist.counted)
        service = await start()
        run, archivist = await service.load("job"), Archivist(service=service)
        known = set(np.flatnonzero(run.manifest.num_rows != UNCOUNTED).tolist())
        archivist.join()
        await run.wait_ready()
    assert (run.cursor.state, run.cursor.num_steps, len(known)) == ("DONE", 36, SHARDS)


async def test_a_shard_that_is_slow_to_be_counted_holds_up_the_steps_behind_it_only(start: Start) -> None:
    service = await start()
    slow = Archivist(service=service, silent=frozenset({7}))
    run = await begin(service, slow)
    session = run.open_session(0, 1)
    consuming = asyncio.create_task(consume(run, session))
    await until(lambda: not run.cursor.steps and not run.batches.knows(run.cursor.committed))
    before = run.cursor.committed
    slow.silent = frozenset()
    service.fleet.leave(slow.member, "slow")
    slow.join()
    assert await consuming == list(range(18))
    assert before < 18


async def test_a_job_of_so_many_steps_counts_no_more_than_these_need(start: Start) -> None:
    service = await start()
    archivist = Archivist(service=service)
    run = await begin(service, archivist, steps=3)
    assert run.cursor.num_steps == 3
    assert await consume(run, run.open_session(0, 1)) == [0, 1, 2]
    assert run.cursor.state == "DONE"
    assert run.manifest.num_counted < SHARDS


async def test_other_weights_hold_for_shards_that_are_not_counted_yet(start: Start) -> None:
    service = await start()
    run = await begin(service, Archivist(service=service))
    await told_step(run.open_session(0, 1), 1)
    await run.set_weights(5, {"d": 2.0})
    assert await consume(run, run.open_session(0, 1)) == list(range(18))


async def test_a_shard_that_cannot_be_counted_fails_the_job_with_its_sentence(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.reorder_service.jobs.work_orders.RETRY_PAUSES_S", ())
    service = await start()
    silent = Archivist(service=service, silent=frozenset(range(SHARDS)))
    silent.join()
    run = await submit(service, join=False)
    await until(lambda: run.manifest.vocabulary is not None and bool(silent.member.leases))
    service.fleet.fail(silent.member, next(iter(silent.member.leases)), "cannot read the shard /d/0")
    await run.wait_ready()
    assert (run.cursor.state, run.cursor.message) == ("FAILED", "cannot read the shard /d/0")


async def test_nothing_is_counted_ahead_before_the_first_step_is_planned(start: Start) -> None:
    service = await start()
    archivist = Archivist(service=service, unprobed=True)
    run = await begin(service, archivist, global_batch=2, window=1)
    await until(lambda: archivist.asked_to_probe)
    assert len(archivist.counted) == BLOCK, "a job that begins waits for its first batch, not for shards behind it"
    archivist.unprobed = False
    service.fleet.leave(archivist.member, "slow")
    archivist.join()
    assert len(await consume(run, run.open_session(0, 1))) == SHARDS * ROWS // 2
