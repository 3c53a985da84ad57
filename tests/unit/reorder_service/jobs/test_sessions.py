"""What each rank of a job is told, and what a step leaves behind when all have committed."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest

from headrace.errors import ConflictError, NotFoundError, SupersededError, UserError
from headrace.plan import Microbatch, StepPlan, Topology
from headrace.quarantine import Reason, Rejected
from headrace.reorder_service.api.sessions import plan_events
from headrace.reorder_service.jobs.planned_step import PlannedPart, PlannedStep, RankCommit
from headrace.reorder_service.jobs.sessions import Ended, EventBatch, Session, Sessions
from headrace.reorder_service.planning.strategies import plan as make_plan
from headrace.sample import Probe, SampleRef
from headrace.spec import parse_spec
from headrace.v1 import sessions_pb2
from tests.unit.reorder_service.job_world import told_by

SHAPE = {"encoder": 1, "llm": 1}


def make_step(index: int = 0, num_samples: int = 8, *, replicas: int = 2, part_samples: int = 16) -> PlannedStep:
    """Two microbatches a replica; samples are dealt out in turn."""
    ids = list(range(num_samples))
    slots = [tuple(ids[start :: 2 * replicas]) for start in range(2 * replicas)]
    microbatches = [Microbatch(units={"encoder": slot, "llm": slot}) for slot in slots]
    step = PlannedStep(index=index, refs=[SampleRef(sample_id=i, shard=0, row=i) for i in ids])
    step.probes = {i: Probe(name=f"n{i}", num_tokens=1, num_targets=1) for i in ids}
    plan = StepPlan(
        strategy="random",
        seed=0,
        topology=Topology(replicas=replicas, microbatches=2, stages=SHAPE),
        replicas=tuple(tuple(microbatches[2 * r : 2 * r + 2]) for r in range(replicas)),
    )
    step.cut(plan, part_samples=part_samples, ticket=lambda part: f"job/{part}")
    return step


def part(ticket: str, replica: int = 0, encoder: int | None = None) -> PlannedPart:
    """`encoder`: the encoder's replica, where it is not that of the LLM."""
    places = frozenset({("llm", replica), ("encoder", replica if encoder is None else encoder)})
    return PlannedPart(ticket=ticket, replica=replica, microbatch=0, places=places, samples=(), shards={})


async def tickets_told(session: Session) -> list[str]:
    """Of all parts whose places are told at once."""
    return [
        event.ticket for told in await anext(session.event_batches()) for event in told.events if isinstance(event, PlannedPart)
    ]


@pytest.mark.parametrize("part_samples", [1, 2, 3, 16])
def test_parts_cover_the_plan_and_are_no_larger_than_asked(part_samples: int) -> None:
    step = make_step(num_samples=11, part_samples=part_samples)
    assert step.plan is not None
    assert all(1 <= len(p.samples) <= part_samples for p in step.parts.values())
    for r, replica in enumerate(step.plan.replicas):
        for k, microbatch in enumerate(replica):
            ids = [s.sample_id for p in step.parts.values() if (p.replica, p.microbatch) == (r, k) for s in p.samples]
            assert sorted(ids) == sorted(microbatch.sample_ids)


def test_each_rank_that_shares_a_sample_is_told_of_its_part() -> None:
    step = make_step(replicas=3, part_samples=1)
    assert step.plan is not None
    shared = PlannedStep(index=0, refs=step.refs, probes=step.probes)
    shared.cut(replace(step.plan, degrees={2: 2}), part_samples=1, ticket=lambda part: f"job/{part}")
    there = {place: {s.sample_id for p in parts for s in p.samples} for place, parts in shared.parts_at.items()}
    before = {place: {s.sample_id for p in parts for s in p.samples} for place, parts in step.parts_at.items()}
    assert before["llm", 1] >= {2}
    assert there == {**before, ("llm", 2): before["llm", 2] | {2}}, "encoders have what they had"
    for named in (True, False):
        told, sessions = list[str](), Sessions("job")
        for rank in range(3):
            session = sessions.open(rank, 3, 3, [rank] if named else ())
            [event] = sessions_pb2.PlanEvents.FromString(plan_events(EventBatch([shared]), session)).events
            told += [ticket for microbatch in event.plan.microbatches for ticket in microbatch.tickets]
        assert len(told) == len(set(told)) + named == 8 + named, "a loader that names no replicas gets whole samples"


@pytest.mark.parametrize("part_samples", [1, 3, 16])
def test_samples_of_a_pack_stand_one_behind_the_other(part_samples: int) -> None:
    rng = np.random.default_rng(part_samples)
    document = {"name": "job", "sources": [{"path": "/d"}], "pack_tokens": 64, "text": {"max_tokens": 64}}
    spec = parse_spec(document | {"topology": {"replicas": 2, "microbatches": 3}})
    tokens = {i: int(length) for i, length in enumerate(rng.integers(1, 65, 40))}
    step = PlannedStep(index=0, refs=[SampleRef(sample_id=i, shard=int(rng.integers(3)), row=i) for i in tokens])
    step.probes = {i: Probe(name=f"n{i}", num_tokens=length, num_targets=1) for i, length in tokens.items()}
    step.sample_ids = np.arange(40)
    plan = step.make_plan(spec, spec.topology, vocab=9, generation=1)
    step.cut(plan, part_samples=part_samples, ticket=str)
    packs = {(r, k): step.packs_in(r, k) for r in range(2) for k in range(3)}
    for place, of_microbatch in packs.items():
        rows = [ref.sample_id for ticket in step.tickets.get(place, ()) for ref in step.parts[ticket].samples]
        assert [sample for pack in of_microbatch for sample in pack] == rows
        assert sorted(rows) == sorted(plan.replicas[place[0]][place[1]].sample_ids)
    whole = [pack for of_microbatch in packs.values() for pack in of_microbatch]
    assert all(sum(tokens[sample] for sample in pack) <= 64 for pack in whole)
    assert len(whole) == len(set(step.packs.values())) < 40, "no pack is torn apart"


def test_without_packing_there_are_no_packs() -> None:
    assert make_step().packs_in(0, 0) == []


def test_tickets_are_the_same_whenever_a_step_is_planned_again() -> None:
    assert list(make_step().parts) == list(make_step().parts)
    assert not set(make_step(0).parts) & set(make_step(1).parts)


def test_ranks_share_the_replicas() -> None:
    sessions = Sessions("job")
    ranks = [sessions.open(rank, 3, 5) for rank in range(3)]
    taken = [list(session.replicas_of(5)) for session in ranks]
    assert taken == [[0, 3], [1, 4], [2]]


async def test_a_process_of_a_pipeline_gets_the_parts_of_the_replicas_that_it_names() -> None:
    sessions = Sessions("job")
    encoder, first, second = (sessions.open(rank, 3, 2, named) for rank, named in enumerate([(0, 1), (0,), (1,)]))
    for replica in range(2):
        sessions.tell_location(part(f"t{replica}", replica))
    told = [await tickets_told(session) for session in (encoder, first, second)]
    assert told == [["t0", "t1"], ["t0"], ["t1"]]


async def test_a_process_hears_of_the_parts_whose_samples_its_replica_of_its_unit_has() -> None:
    sessions = Sessions("job")
    encoders, llms = (
        [sessions.open(first + replica, 4, 2, (replica,), unit=unit) for replica in range(2)]
        for unit, first in (("encoder", 0), ("llm", 2))
    )
    for moved in (part("stays", 1), part("moves", replica=1, encoder=0)):
        sessions.tell_location(moved)
    sessions.tell_location(part("first", 0))
    assert [await tickets_told(session) for session in encoders] == [["moves", "first"], ["stays"]]
    assert [await tickets_told(session) for session in llms] == [["first"], ["stays", "moves"]]


def test_samples_with_the_same_replicas_stand_together_in_their_microbatch() -> None:
    rng = np.random.default_rng(1)
    ids, topology = range(40), Topology(replicas=4, microbatches=2, stages={"encoder": 1, "llm": 1})
    plan = make_plan("orchmllm", np.array(ids), {unit: rng.pareto(1.5, 40) + 0.1 for unit in topology.stages}, topology, seed=0)
    encoder = {i: r for r, replica in enumerate(plan.replicas) for microbatch in replica for i in microbatch.units["encoder"]}
    step = PlannedStep(index=0, refs=[SampleRef(sample_id=i, shard=i % 3, row=i) for i in ids])
    step.probes = dict.fromkeys(ids, Probe(name="n", num_tokens=1, num_targets=1))
    step.cut(plan, part_samples=2, ticket=str)
    for tickets in step.tickets.values():
        replicas = [encoder[ref.sample_id] for ticket in tickets for ref in step.parts[ticket].samples]
        assert replicas == sorted(replicas)
    for place, parts in step.parts_at.items():
        assert all(place in part.places for part in parts)


def test_ranks_that_name_their_replicas_take_the_place_of_those_that_do_not() -> None:
    sessions = Sessions("job")
    former = [sessions.open(rank, 2, 2) for rank in range(2)]
    latter = sessions.open(0, 2, 2, named=(0, 1))
    assert all(isinstance(session.over, SupersededError) for session in former)
    assert list(sessions.by_rank.values()) == [latter]


async def test_nodes_that_commit_together_each_hear_of_all_parts_and_come_and_go() -> None:
    sessions = Sessions("job")
    nodes = [sessions.open(rank, 0, 2, together=True) for rank in (0, 9, 4)]
    for replica in range(2):
        sessions.tell_location(part(f"t{replica}", replica))
    assert [await tickets_told(session) for session in nodes] == [["t0", "t1"]] * 3
    assert sessions.num_ranks == 1
    sessions.leave(nodes[1])
    assert list(sessions.by_rank.values()) == [nodes[0], nodes[2]]
    assert [session.over is not None for session in nodes] == [False, True, False]


def test_nodes_that_commit_together_and_other_ranks_do_not_mix() -> None:
    sessions = Sessions("job")
    sessions.open(0, 1, 2, together=True).streaming = True
    with pytest.raises(ConflictError, match="rank 1 of 2 cannot open while rank 0 of nodes that commit together is connected"):
        sessions.open(1, 2, 2)
    sessions.by_rank[0].streaming = False
    sessions.open(1, 2, 2).streaming = True
    with pytest.raises(ConflictError, match="rank 3 of nodes that commit together cannot open while rank 1 of 2 is connected"):
        sessions.open(3, 2, 2, together=True)


def test_a_replica_that_the_job_has_not_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"takes replica 2, but job 'job' has 2.*--replicas 3"):
        Sessions("job").open(0, 3, 2, named=(1, 2))


@pytest.mark.parametrize(("rank", "num_ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_of_its_number_is_refused(rank: int, num_ranks: int) -> None:
    with pytest.raises(UserError, match="is not in 0"):
        Sessions("job").open(rank, num_ranks, 4)


@pytest.mark.parametrize(("num_ranks", "named"), [(2**31 - 1, (0,)), (1, range(15_000_000))])
def test_more_ranks_or_replicas_than_are_served_are_refused_unseen(num_ranks: int, named: Collection[int]) -> None:
    with pytest.raises(UserError, match="at most 1048576 ranks are served, and 16384 replicas"):
        Sessions("job").open(0, num_ranks, 2, named)


def test_more_ranks_than_replicas_are_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match="headrace job topology job --replicas 3"):
        Sessions("job").open(0, 3, 2)


def test_opening_a_rank_again_supersedes_its_former_session_only() -> None:
    sessions = Sessions("job")
    former, other = sessions.open(0, 2, 2), sessions.open(1, 2, 2)
    latter = sessions.open(0, 2, 2)
    assert [session.over is not None for session in (former, other, latter)] == [True, False, False]
    assert sessions.by_rank == {0: latter, 1: other}
    assert former.id != latter.id


def test_another_number_of_ranks_supersedes_those_that_are_gone() -> None:
    sessions = Sessions("job")
    gone = [sessions.open(rank, 4, 4) for rank in range(4)]
    sessions.open(1, 2, 4)
    assert all(isinstance(session.over, SupersededError) for session in gone)
    assert (list(sessions.by_rank), sessions.num_ranks) == ([1], 2)


def test_another_number_of_ranks_is_refused_while_one_is_connected() -> None:
    sessions = Sessions("job")
    sessions.open(1, 2, 4).streaming = True
    with pytest.raises(ConflictError, match="rank 1 of 2 is connected"):
        sessions.open(0, 3, 4)
    assert sessions.num_ranks == 2


def test_a_rank_that_has_gone_on_from_its_state_may_be_taken_back() -> None:
    sessions = Sessions("job")
    first, second = (sessions.open(rank, 2, 2) for rank in range(2))
    first.opened_at_step = first.next_step = second.opened_at_step = second.next_step = 4
    second.next_step = 5
    assert sessions.opened_at_step() == {0: 4, 1: None}
    sessions.leave(first)
    first.has_streamed = True
    assert sessions.opened_at_step() == {1: None}


async def test_all_there_is_comes_at_a_time_and_steps_before_the_places_of_their_parts() -> None:
    sessions = Sessions("job")
    session = sessions.open(0, 1, 1)
    first, second = make_step(0), make_step(1)
    listening = session.event_batches()
    sessions.tell_step(first)
    sessions.tell_location(part("a"))
    sessions.tell_location(part("b"))
    sessions.tell_step(second)
    (told,) = await anext(listening)
    assert list(told.events[:2]) == [first, second]
    assert [getattr(event, "ticket", None) for event in told.events[2:]] == ["a", "b"]
    sessions.tell_location(part("c"))
    (told,) = await anext(listening)
    assert [getattr(event, "ticket", None) for event in told.events] == ["c"]


async def test_what_is_told_to_one_lane_is_one_and_the_same() -> None:
    sessions = Sessions("job")
    encoder, first, second = (sessions.open(rank, 3, 2, named) for rank, named in enumerate([(0, 1), (1,), (1,)]))
    sessions.tell_step(make_step())
    told = {session: (await anext(session.event_batches()))[0] for session in (encoder, first, second)}
    assert told[first] is told[second]
    assert told[first] is not told[encoder]


async def test_a_session_that_opens_late_hears_once_of_what_was_told_before() -> None:
    sessions = Sessions("job")
    early = sessions.open(0, 0, 2, together=True)
    step = make_step()
    sessions.tell_step(step)
    late = sessions.open(1, 0, 2, together=True)
    next(iter(step.parts.values())).lease = "taken"
    late.tell_planned([step])
    sessions.tell_location(next(iter(step.parts.values())))
    early.tell_end("")
    late.tell_end("")
    assert [type(event) for event in [event async for event in told_by(early)]] == [PlannedStep, PlannedPart, Ended]
    assert [type(event) for event in [event async for event in told_by(late)]] == [PlannedStep, PlannedPart, PlannedPart, Ended]


async def test_a_lane_that_nobody_is_left_in_keeps_nothing() -> None:
    sessions = Sessions("job")
    node = sessions.open(0, 0, 1, together=True)
    sessions.leave(node)
    sessions.tell_step(make_step())
    again = sessions.open(0, 0, 1, together=True)
    again.tell_end("")
    assert [type(event) for event in [event async for event in told_by(again)]] == [Ended]


def test_lanes_are_dropped_with_their_last_session() -> None:
    """A process may name other replicas whenever it opens."""
    sessions, step = Sessions("job"), make_step()
    stays = sessions.open(1, 2, 64, [0])
    for named in range(1, 64):
        session = sessions.open(0, 2, 64, [0, named])
        plan_events(EventBatch([step]), session)
    assert (len(sessions._lanes), len(step.messages)) == (2, 1)
    sessions.by_rank[0].end(NotFoundError("closed"))
    assert [list(lanes) for lanes in sessions._lanes_at.values()] == [[stays.lane]]
    sessions.end_all(SupersededError("set back"))
    assert not sessions._lanes
    assert not sessions._lanes_at


async def test_a_part_that_moves_twice_is_told_once_where_it_is_now() -> None:
    sessions = Sessions("job")
    session = sessions.open(0, 1, 1)
    moving = part("a")
    for lease in ("l1", "l2"):
        moving.lease = lease
        sessions.tell_location(moving)
    session.tell_end("")
    assert [event async for event in told_by(session)] == [moving, Ended(message="")]


async def test_places_of_other_ranks_are_not_told() -> None:
    sessions = Sessions("job")
    session = sessions.open(1, 2, 2)
    sessions.tell_location(part("theirs", 0))
    sessions.tell_location(part("ours", 1))
    session.tell_end("why")
    events = [event async for event in told_by(session)]
    assert [type(event) for event in events] == [PlannedPart, Ended]
    assert isinstance(events[0], PlannedPart)
    assert events[0].ticket == "ours"


async def test_a_superseded_session_hears_nothing_more() -> None:
    sessions = Sessions("job")
    session = sessions.open(0, 1, 1)
    sessions.tell_step(make_step())
    session.end(SupersededError("opened again"))
    with pytest.raises(SupersededError, match="opened again"):
        await anext(session.event_batches())


def commit(loss: float = math.nan, rejected: tuple[Rejected, ...] = (), step_s: float = 1.0, wait_s: float = 0.0) -> RankCommit:
    return RankCommit(rejected=rejected, loss=loss, step_s=step_s, data_wait_s=wait_s)


def test_a_step_records_what_was_consumed_and_the_slowest_rank() -> None:
    step = make_step(num_samples=4)
    probed_bad = Rejected(name="bad", reason=Reason.SCHEMA_ERROR, detail="", sample_id=9)
    late = Rejected(name="n2", reason=Reason.CORRUPT_MEDIA, detail="", sample_id=2)
    step.rejected.append(probed_bad)
    step.commits = {0: commit(step_s=2.0, wait_s=0.1, rejected=(late,)), 1: commit(loss=3.0, wait_s=0.5, rejected=(late,))}
    record, rejected = step.record(lambda _: "d")
    assert record.samples == ("n0", "n1", "n3")
    assert (record.loss, record.step_s, record.data_wait_s) == (3.0, 2.0, 0.5)
    assert rejected == [probed_bad, late]


def test_a_step_without_a_sample_and_without_a_loss_is_recorded_too() -> None:
    step = make_step(num_samples=0)
    step.commits = {0: commit()}
    record, rejected = step.record(lambda _: "d")
    assert (record.samples, rejected) == ((), [])
    assert math.isnan(record.loss)
    assert step.sample_ids.dtype == np.int64
