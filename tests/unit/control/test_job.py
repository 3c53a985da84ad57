"""A job between its store, its fleet and its trainers: commits, going back, and what becomes of them under disturbance."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConflictError, SupersededError, UserError
from headrace.spec import TopologySpec, parse_spec
from headrace.v1 import common_pb2, fleet_pb2
from reorder_service.fleet import Member
from reorder_service.job import JobRun
from reorder_service.service import ReorderService
from reorder_service.sessions import Session
from reorder_service.state import StateStore
from reorder_service.step import RankCommit, Step

ROWS = 24


@dataclass(kw_only=True)
class Preprocessor:
    """A member of the fleet that answers every order in the next turn of the loop. In each source: one shard of ROWS rows."""

    service: ReorderService
    name: str = "p"
    answers: bool = True
    decoded: list[str] = field(default_factory=list)

    def join(self) -> Member:
        def introduce(job: str) -> fleet_pb2.FleetOrder:
            return fleet_pb2.FleetOrder(job_opened=fleet_pb2.JobOpened(job=job))

        self.member = Member(
            name=self.name, endpoint=f"{self.name}:1", slots=4, send=self._hear, introduce=introduce, dismiss=lambda: None
        )
        self.service.fleet.join(self.member)
        return self.member

    def _hear(self, order: fleet_pb2.FleetOrder) -> None:
        kind = order.WhichOneof("order")
        body = getattr(order, kind)
        if self.answers and kind in ("list_shards", "index_shard", "probe_samples", "decode_part"):
            asyncio.get_running_loop().call_soon(self.service.fleet.finish, self.member, body.lease, self._result(kind, body))

    def _result(self, kind: str, body: Any) -> Any:
        match kind:
            case "list_shards":
                sources = self.service.find(body.job).spec.sources
                shards = [common_pb2.Shard(source=n, url="/d/a.tar", name=f"{s.name}/a") for n, s in enumerate(sources)]
                return fleet_pb2.ShardsListed(shards=shards, vocabulary=common_pb2.Vocabulary(size=9))
            case "index_shard":
                return fleet_pb2.ShardIndexed(num_samples=ROWS)
            case "probe_samples":
                names = [source.name for source in self.service.find(body.job).spec.sources]
                probes = [
                    common_pb2.Probe(sample_id=s.sample_id, name=f"{names[s.shard]}/a/{s.row}", num_tokens=4, num_targets=2)
                    for s in body.samples
                ]
                return fleet_pb2.SamplesProbed(probes=probes)
            case _:
                self.decoded.append(body.ticket)
                return fleet_pb2.PartDecoded()


Start = Callable[[], Awaitable[ReorderService]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start a service on the test's store; the former one ends, as a process would."""
    running: list[ReorderService] = []

    async def start_service() -> ReorderService:
        if running:
            await end(running.pop())
        service = ReorderService(await StateStore.open(f"embedded:{tmp_path / 'store'}"))
        running.append(service)
        await service.start()
        return service

    yield start_service
    for service in running:
        await end(service)


async def end(service: ReorderService) -> None:
    await service.stop()
    await service.store.close()


async def submit(service: ReorderService, *, replicas: int = 2, join: bool = True, **fields: Any) -> JobRun:
    document: dict[str, Any] = {
        "name": "job",
        "sources": [{"path": "/d"}],
        "global_batch": 4,
        "topology": {"replicas": replicas, "microbatches": 1},
        "window": 2,
    }
    if join:
        Preprocessor(service=service).join()
    run = await service.submit(parse_spec(document | fields).to_json())
    if join:
        await run.wait_ready()
    return run


def commit(loss: float = math.nan) -> RankCommit:
    return RankCommit(rejected=(), loss=loss, step_s=1.0, data_wait_s=0.0)


async def names(run: JobRun) -> list[tuple[str, ...]]:
    return [record.samples async for record in run._store.steps(run.name)]


async def consume(run: JobRun, session: Session, stop: int | None = None) -> list[int]:
    """Commit each step once it is told, in order, up to `stop`; the steps committed."""
    done: list[int] = []
    told: set[int] = set()
    async for event in session.events():
        if isinstance(event, Step):
            told.add(event.index)
        while run.committed in told and run.committed != stop:
            done.append(run.committed)
            await run.commit(session, run.committed, commit(float(run.committed)))
        if run.committed == stop:
            break
    return done


async def until(condition: Callable[[], bool]) -> None:
    """Let everything else in the loop go on until `condition` holds."""
    while not condition():  # noqa: ASYNC110 - the test's own view of others' turns
        await asyncio.sleep(0)


async def told_step(session: Session, index: int) -> Step:
    async for event in session.events():
        if isinstance(event, Step) and event.index == index:
            return event
    raise AssertionError(f"step {index} was not told")


async def test_a_job_runs_to_its_end_and_every_sample_is_in_the_ledger_once(start: Start) -> None:
    run = await submit(await start())
    assert await consume(run, run.open_session(0, 1)) == list(range(6))
    assert run.state == "DONE"
    ledger = [name for step in await names(run) for name in step]
    assert sorted(ledger) == sorted(f"d/a/{row}" for row in range(ROWS))
    assert (run.progress.samples, run.progress.first_loss, run.progress.last_loss) == (ROWS, 0.0, 5.0)
    assert not run._fleet.members["p"].kept


async def test_the_window_bounds_what_is_planned_ahead(start: Start) -> None:
    run = await submit(await start())
    session = run.open_session(0, 1)
    await told_step(session, 1)
    assert sorted(run.steps) == [0, 1]
    with pytest.raises(ConflictError, match="step 2 of job 'job' is not planned"):
        await run.commit(session, 2, commit())


async def test_a_step_is_committed_when_every_rank_has_and_repeating_is_harmless(start: Start) -> None:
    run = await submit(await start())
    ranks = [run.open_session(rank, 2) for rank in range(2)]
    assert not await run.commit(ranks[0], 0, commit())
    assert not await run.commit(ranks[0], 0, commit())
    assert not await run.commit(ranks[0], 1, commit())
    assert await run.commit(ranks[1], 0, commit())
    assert await run.commit(ranks[0], 0, commit())
    assert (run.committed, len(await names(run))) == (1, 1)


async def test_ranks_that_come_back_in_another_number_commit_anew(start: Start) -> None:
    """What rank 1 of 3 had committed must not count as rank 1 of 2's."""
    run = await submit(await start(), replicas=3)
    three = [run.open_session(rank, 3) for rank in range(3)]
    for session in three[1:]:
        assert not await run.commit(session, 0, commit())
    two = [run.open_session(rank, 2) for rank in range(2)]
    assert not await run.commit(two[0], 0, commit())
    with pytest.raises(SupersededError):
        await run.commit(three[0], 0, commit())
    assert await run.commit(two[1], 0, commit())


async def test_a_commit_after_a_restart_waits_until_its_step_is_planned_again(start: Start) -> None:
    run = await submit(await start())
    first = await told_step(run.open_session(0, 1), 0)
    service = await start()
    run = service.find("job")
    await run.wait_ready()
    committing = asyncio.create_task(run.commit(run.open_session(0, 1), 0, commit()))
    await asyncio.sleep(0)
    assert not committing.done(), "no preprocessor has come back yet"
    Preprocessor(service=service).join()
    assert await committing
    assert await names(run) == [tuple(sorted(probe.name for probe in first.probes.values()))]


async def test_a_restarted_service_tells_the_same_steps_with_the_same_tickets(start: Start) -> None:
    run = await submit(await start())
    before = await told_step(run.open_session(0, 1), 1)
    service = await start()
    run = service.find("job")
    Preprocessor(service=service).join()
    after = await told_step(run.open_session(0, 1), 1)
    assert before is not after
    assert (before.refs, before.plan, list(before.parts)) == (after.refs, after.plan, list(after.parts))


async def test_going_back_undoes_later_commits_and_the_same_samples_come_again(start: Start) -> None:
    run = await submit(await start())
    await consume(run, run.open_session(0, 1))
    whole = await names(run)
    await run.rewind(2)
    assert (run.state, run.committed, run.progress.samples) == ("RUNNING", 2, 8)
    assert await consume(run, run.open_session(0, 1)) == [2, 3, 4, 5]
    assert (run.state, await names(run)) == ("DONE", whole)


async def test_ranks_may_all_ask_to_go_back_at_once(start: Start) -> None:
    run = await submit(await start())
    await consume(run, run.open_session(0, 1), stop=4)
    await asyncio.gather(*(run.rewind(1) for _ in range(4)))
    assert (run.committed, run.progress.samples, len(await names(run))) == (1, 4, 1)
    assert await consume(run, run.open_session(0, 1)) == [1, 2, 3, 4, 5]


async def test_a_commit_that_meets_a_rewind_does_not_tear_the_ledger(start: Start) -> None:
    run = await submit(await start())
    session = run.open_session(0, 1)
    await consume(run, session, stop=3)
    committing = asyncio.create_task(run.commit(session, 3, commit()))
    await asyncio.sleep(0)
    await run.rewind(1)
    await asyncio.gather(committing, return_exceptions=True)
    assert (run.committed, len(await names(run))) == (1, 1)
    assert await consume(run, run.open_session(0, 1)) == [1, 2, 3, 4, 5]


async def test_a_commit_whose_caller_goes_away_is_whole(start: Start) -> None:
    run = await submit(await start())
    session = run.open_session(0, 1)
    await told_step(session, 0)
    committing = asyncio.create_task(run.commit(session, 0, commit()))
    await until(run._committing.locked)
    committing.cancel()
    await asyncio.gather(committing, return_exceptions=True)
    again = run.open_session(0, 1)
    await told_step(again, 2)  # the window has moved
    assert (run.committed, len(await names(run))) == (1, 1)


async def test_going_back_further_than_the_commits_reach_is_refused(start: Start) -> None:
    run = await submit(await start())
    with pytest.raises(ConflictError, match="committed only 0"):
        await run.rewind(1)


async def test_a_job_that_was_cancelled_stays_so(start: Start) -> None:
    service = await start()
    run = await submit(service)
    session = run.open_session(0, 1)
    await consume(run, session, stop=2)
    await run.cancel()
    with pytest.raises(ConflictError, match="cancelled"):
        await run.commit(session, 2, commit())
    await run.rewind(1)
    assert (run.state, run.committed) == ("CANCELLED", 2)
    assert not run._fleet.members["p"].leases
    again = (await start()).find("job")
    assert again.state == "CANCELLED"
    await again.wait_ready()
    events = [event async for event in again.open_session(0, 1).events()]
    assert [getattr(event, "message", "") for event in events] == ["job 'job' was cancelled"]


async def test_a_data_set_that_cannot_be_read_fails_the_job_with_its_sentence(start: Start) -> None:
    service = await start()
    run = await submit(service, join=False)
    silent = Preprocessor(service=service, answers=False)
    member = silent.join()
    await until(lambda: bool(member.leases))
    service.fleet.fail(member, next(iter(member.leases)), "no data set at /d")
    await run.wait_ready()
    assert (run.state, run.message) == ("FAILED", "no data set at /d")


async def test_work_of_a_preprocessor_that_leaves_is_done_by_another(start: Start) -> None:
    service = await start()
    run = await submit(service, join=False)
    member = Preprocessor(service=service, name="mortal", answers=False).join()
    Preprocessor(service=service, name="lives").join()
    await until(lambda: bool(member.leases))
    service.fleet.leave(member, "test")
    assert await consume(run, await ready(run)) == list(range(6))


async def ready(run: JobRun) -> Session:
    await run.wait_ready()
    return run.open_session(0, 1)


async def test_a_part_that_a_trainer_cannot_fetch_gets_another_place(start: Start) -> None:
    service = await start()
    run = await submit(service)
    step = await told_step(run.open_session(0, 1), 0)
    part = next(iter(step.parts.values()))
    Preprocessor(service=service, name="q").join()
    lease = part.lease
    run.report_lost(part.ticket, "some older lease")
    assert part.lease == lease
    run.report_lost(part.ticket, lease)
    assert part.lease != lease
    assert part.endpoint == "q:1"


async def test_submitting_the_same_spec_again_and_at_once_gives_one_job(start: Start) -> None:
    service = await start()
    runs = await asyncio.gather(*(submit(service, join=False) for _ in range(3)))
    assert runs[0] is runs[1] is runs[2]
    with pytest.raises(ConflictError, match="another spec"):
        await submit(service, join=False, seed=1)
    assert await service.store.jobs() == ["job"]


async def test_a_submission_that_was_cut_off_is_taken_up_by_the_next(start: Start) -> None:
    service = await start()
    spec = parse_spec({"name": "cut", "sources": [{"path": "/d"}]})
    await service.store.create_job("cut", spec.to_json())
    assert (await service.submit(spec.to_json())).name == "cut"


async def test_who_takes_over_probes_nothing_again(start: Start) -> None:
    run = await submit(await start())
    before = await told_step(run.open_session(0, 1), 1)
    service = await start()
    run = service.find("job")
    asked: list[str] = []
    preprocessor = Preprocessor(service=service)
    hear = preprocessor._hear
    preprocessor._hear = lambda order: (asked.append(order.WhichOneof("order")), hear(order))[-1]  # type: ignore[method-assign]
    preprocessor.join()
    assert (await told_step(run.open_session(0, 1), 1)).probes == before.probes
    assert "decode_part" in asked
    assert "probe_samples" not in asked


async def test_a_new_topology_plans_the_uncommitted_steps_anew(start: Start) -> None:
    run = await submit(await start(), replicas=2)
    stale = run.open_session(0, 1)
    before = await told_step(stale, 1)
    await run.set_topology(TopologySpec(replicas=1, microbatches=4))
    after = await told_step(run.open_session(0, 1), 1)
    assert after.plan is not None
    assert before.plan is not None
    assert (len(before.plan.replicas), len(after.plan.replicas)) == (2, 1)
    assert after.refs == before.refs
    assert not after.parts.keys() & before.parts.keys()
    assert after.plan.generation == run.generation == 2
    with pytest.raises(SupersededError, match="generation 2 now; connect again"):
        await run.commit(stale, 0, commit())
    with pytest.raises(SupersededError, match="connect again"):
        run.open_session(0, 1, generation=1)


async def test_the_same_topology_again_changes_nothing(start: Start) -> None:
    run = await submit(await start(), replicas=2)
    await run.set_topology(run.topology)
    assert run.generation == 1


async def test_a_topology_outlives_the_service(start: Start) -> None:
    run = await submit(await start(), replicas=2)
    await run.set_topology(TopologySpec(replicas=3))
    again = (await start()).find("job")
    assert (again.topology.replicas, again.generation) == (3, 2)


async def test_other_weights_hold_from_their_step_on_and_again_after_a_reset(start: Start) -> None:
    sources = [{"path": "/d", "name": "a", "weight": 1}, {"path": "/d", "name": "b", "weight": 1}]
    run = await submit(await start(), sources=sources, steps=8)
    await consume(run, run.open_session(0, 1), stop=1)
    await until(lambda: run.next_step == 3)
    with pytest.raises(ConflictError, match="steps before 3 of job 'job' are planned already"):
        await run.set_weights(2, {"a": 0, "b": 1})
    with pytest.raises(UserError, match="every source once: a, b; got a"):
        await run.set_weights(4, {"a": 1})
    with pytest.raises(UserError, match="weights must be numbers"):
        await run.set_weights(4, {"a": 0, "b": 0})
    await run.set_weights(4, {"a": 0, "b": 1})
    await consume(run, run.open_session(0, 1))
    whole = await names(run)
    per_step = [Counter(name.split("/")[0] for name in step) for step in whole]
    assert per_step[:4] == [Counter(a=2, b=2)] * 4
    assert per_step[4:] == [Counter(b=4)] * 4
    assert run.progress.delivered["b"][0] == 4 * 2 + 4 * 4
    await run.rewind(2)
    await consume(run, run.open_session(0, 1))
    assert await names(run) == whole


async def test_a_paused_job_plans_no_further_step(start: Start) -> None:
    run = await submit(await start())
    session = run.open_session(0, 1)
    await told_step(session, 1)
    await run.pause(True)
    assert await consume(run, run.open_session(0, 1), stop=2) == [0, 1]
    assert not run.steps
    service = await start()
    again = service.find("job")
    Preprocessor(service=service).join()
    assert again.paused
    await again.wait_ready()
    await again.pause(False)
    assert await consume(again, again.open_session(0, 1), stop=3) == [2]


async def test_a_replica_of_three_times_the_speed_gets_three_times_the_samples(start: Start) -> None:
    run = await submit(await start(), replicas=2)
    await run.set_topology(TopologySpec(replicas=2, microbatches=1, speeds=(1.0, 3.0)))
    step = await told_step(run.open_session(0, 1), 0)
    assert step.plan is not None
    assert [len(replica[0].sample_ids) for replica in step.plan.replicas] == [1, 3]


async def test_a_job_that_failed_goes_on_when_it_is_submitted_again(start: Start) -> None:
    service = await start()
    run = await submit(service, join=False)
    member = Preprocessor(service=service, answers=False).join()
    await until(lambda: bool(member.leases))
    service.fleet.fail(member, next(iter(member.leases)), "no data set at /d")
    await until(lambda: run.state == "FAILED")
    service.fleet.leave(member, "mended")
    assert await submit(service) is run
    assert await consume(run, run.open_session(0, 1)) == [0, 1, 2, 3, 4, 5]
    assert run.state == "DONE"
