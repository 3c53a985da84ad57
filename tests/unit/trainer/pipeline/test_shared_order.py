"""Units on the LLM's ranks: whose turn it is on each of them, and that every rank's turns fit together."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.execution_spec import COLOCATED, NESTED
from headrace.plan import Topology
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.strategies import plan as make_plan
from headrace.schedule import Action, Kind
from headrace.spec import STRATEGIES, parse
from headrace.trainer.pipeline.deadlock import check_order
from headrace.trainer.pipeline.message_order import Post, Program, actions_of
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.shared_order import hosts_of, shared_order
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from tests.examples import with_examples

MICROBATCHES, SAMPLES = 6, 40
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "eager": {"schedule": "eager", "in_flight": 4},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "zero-bubble": {"schedule": "zero-bubble"},
}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "replicas on stages": {"vision": {"dp": 2, "on": "llm"}, "llm": {"pp": 2}},
    "replicas on slices": {"vision": {"dp": 4, "on": "llm"}, "llm": {"tp": 2, "pp": 2}},
    "stages on replicas": {"vision": {"pp": 2, "on": "llm"}, "audio": {"dp": 2, "on": "llm"}, "llm": {"dp": 2}},
    "some on ranks of their own": {"vision": {"dp": 3, "on": "llm"}, "audio": {"dp": 2}, "llm": {"dp": 3}},
    "in pieces": {"vision": {"dp": 2, "on": "llm", "pieces": 3}, "llm": {"pp": 2}},
    "a generator": {"vision": {"dp": 2, "on": "llm"}, "llm": {"pp": 2}, "generator": {"dp": 2, "on": "llm"}},
}


def topology_of(units: Mapping[str, Any], **fields: Any) -> PipelineTopology:
    return parse(PipelineTopology, {**fields, "units": units}, "topology")


def routes_of(topology: PipelineTopology, strategy: str, seed: int) -> Routes:
    rng = np.random.default_rng(seed)
    costs = {unit: rng.lognormal(0, 1, SAMPLES) * (rng.random(SAMPLES) < 0.7) + 1e-3 for unit in topology.stages}
    planned = Topology(replicas=topology.units["llm"].dp, microbatches=MICROBATCHES, stages=topology.stages)
    own = {unit: dp for unit, dp in topology.replicas.items() if unit != "llm"}
    execution = Execution(may_cross_replicas=True, unit_replicas=own)
    return Routes(make_plan(strategy, np.arange(SAMPLES), costs, planned, seed=seed, execution=execution), topology.replicas)


def programs_of(topology: PipelineTopology, routes: Routes) -> list[Program]:
    return [
        Program(topology, routes, (unit, replica, stage))
        for unit, size in topology.units.items()
        for replica in range(size.dp)
        for stage in range(size.pp)
    ]


def actions_in_turn(topology: PipelineTopology, routes: Routes, rank: int) -> list[tuple[str, Action]]:
    programs = programs_of(topology, routes)
    left = {program.post: deque(program.actions) for program in programs}
    return [(post[0], left[post].popleft()) for post in shared_order(topology, programs)[rank]]


# -- places -----------------------------------------------------------------------------------------------------------


def test_a_unit_on_the_llm_has_its_ranks() -> None:
    topology = topology_of({"audio": {"dp": 2}, "vision": {"dp": 4, "on": "llm"}, "llm": {"tp": 2, "pp": 2}})
    assert (topology.world_size, topology.num_places, topology.shares_ranks) == (6, 10, True)
    assert (topology.ranks("audio"), topology.ranks("vision"), topology.ranks("llm")) == (range(2), range(2, 6), range(2, 6))
    assert topology.places(0) == (Place("audio", 0, 0, 0),)
    assert topology.places(3) == (Place("vision", 1, 0, 0), Place("llm", 0, 0, 1))
    places = [place for rank in range(6) for place in topology.places(rank)]
    assert sorted(map(topology.number, places)) == list(range(10))
    assert all(topology.rank_of[topology.number(place)] == topology.rank(place) for place in places)
    with pytest.raises(ValueError, match="rank 3 has several places: vision replica 1"):
        topology.place(3)


@pytest.mark.parametrize(
    ("units", "fields", "message"),
    [
        ({"vision": {"dp": 3, "on": "llm"}, "llm": {"pp": 2}}, {}, "dp x tp x pp is 2, but its own is 3: set its dp, tp or pp"),
        ({"vision": {}, "llm": {"on": "llm"}}, {}, "'llm' is on itself: take its on away"),
        ({"vision": {"on": "audio"}, "llm": {}}, {}, "on"),
        ({"llm": {}, "generator": {"on": "llm"}}, {"sharing": COLOCATED}, "cannot run behind all of them: take sharing nested"),
        ({"vision": {"dp": 2, "on": "llm"}, "llm": {"dp": 2, "shard_weights": True}}, {}, "take away either"),
        ({"vision": {"on": "llm"}, "llm": {}}, {"sharing": "somehow"}, "sharing"),
        ({"vision": {"pieces": 2}, "llm": {}}, {}, "2 pieces, pp 1 and chunks 1, but only a unit on the ranks of the llm"),
        ({"vision": {"pp": 2, "pieces": 2, "on": "llm"}, "llm": {"pp": 2}}, {}, "not into stages or chunks too"),
    ],
)
def test_units_that_cannot_share_ranks_are_refused(units: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        topology_of(units, **fields)


# -- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", [NESTED, COLOCATED])
@pytest.mark.parametrize("sizes", SIZES)
@with_examples(10)
@given(st.sampled_from(sorted(SCHEDULES)), st.sampled_from(STRATEGIES), st.integers(0, 2**16))
def test_every_rank_takes_every_action_of_its_places_and_none_waits_forever(
    sizes: str, sharing: str, schedule: str, strategy: str, seed: int
) -> None:
    if (sharing == COLOCATED and "generator" in SIZES[sizes]) or (sizes == "in pieces" and schedule == "interleaved"):
        return
    topology = topology_of(SIZES[sizes], **SCHEDULES[schedule], sharing=sharing)
    routes = routes_of(topology, strategy, seed)
    programs = programs_of(topology, routes)
    turns = shared_order(topology, programs)
    for program in programs:
        for rank in hosts_of(topology, program.post):
            assert turns[rank].count(program.post) == len(program.actions)
    for rank in range(topology.world_size):
        places = topology.places(rank)
        rehearsed = check_order(topology, routes, places)
        own = {(place.unit, place.replica, place.stage) for place in places}
        assert list(rehearsed.turns) == list(turns[rank])
        assert set(rehearsed.turns) <= own
        assert all(needed <= number for number, needed in enumerate(rehearsed.needed))


def test_nested_encoders_run_where_the_llm_would_wait() -> None:
    """The second stage of the llm waits for the first one: there its encoder is a microbatch further."""
    topology = topology_of({"vision": {"dp": 2, "on": "llm"}, "llm": {"pp": 2}})
    routes = routes_of(topology, "joint", 1)
    first, second = ([(unit, action.kind) for unit, action in actions_in_turn(topology, routes, rank)][:4] for rank in (0, 1))
    assert first.index(("llm", Kind.FORWARD)) < second.index(("llm", Kind.FORWARD))
    assert [unit for unit, _ in second[:2]] == ["vision", "vision"]


def test_a_pass_in_pieces_runs_from_the_first_layers_to_the_last_and_back() -> None:
    topology = topology_of(SIZES["in pieces"])
    taken = [action for unit, action in actions_in_turn(topology, routes_of(topology, "joint", 1), 0) if unit == "vision"]
    for kind, chunks in ((Kind.FORWARD, [0, 1, 2]), (Kind.BACKWARD, [2, 1, 0])):
        of_first = [action.chunk for action in taken if action.kind == kind and action.microbatch == taken[0].microbatch]
        assert of_first == chunks


def test_nested_encoders_hold_as_many_microbatches_as_the_schedule_has_them() -> None:
    topology = topology_of({"vision": {"dp": 2, "on": "llm"}, "llm": {"pp": 2}})
    for rank in range(2):
        held, most = 0, 0
        for unit, action in actions_in_turn(topology, routes_of(topology, "joint", 1), rank):
            held += (unit == "vision") * (1 if action.kind == Kind.FORWARD else -1)
            most = max(most, held)
        assert most == 3, "one more than stages are behind it"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_colocated_encoders_run_in_front_of_the_llm_and_behind_it(schedule: str) -> None:
    topology = topology_of(SIZES["replicas on slices"], **SCHEDULES[schedule], sharing=COLOCATED)
    routes = routes_of(topology, "entrain", 2)
    for rank in range(topology.world_size):
        taken = actions_in_turn(topology, routes, rank)
        llm = [number for number, (unit, _) in enumerate(taken) if unit == "llm"]
        assert llm == list(range(llm[0], llm[-1] + 1))
        assert {action.kind for _, action in taken[: llm[0]]} == {Kind.FORWARD}
        assert Kind.FORWARD not in {action.kind for _, action in taken[llm[-1] + 1 :]}


def test_a_unit_with_ranks_of_its_own_keeps_its_schedule() -> None:
    topology = topology_of(SIZES["some on ranks of their own"], sharing=COLOCATED)
    alone = topology_of({unit: {**size, "on": None} for unit, size in SIZES["some on ranks of their own"].items()})
    routes = routes_of(topology, "joint", 3)
    assert actions_of(topology, routes, "audio", 0) == actions_of(alone, routes, "audio", 0)
    assert actions_of(topology, routes, "vision", 0) != actions_of(alone, routes, "vision", 0)


def test_slices_take_the_actions_of_their_stage_in_one_order() -> None:
    topology = topology_of({"vision": {"dp": 4, "on": "llm"}, "llm": {"tp": 2, "pp": 2}})
    turns = shared_order(topology, programs_of(topology, routes_of(topology, "joint", 4)))

    def of_llm(rank: int) -> list[Post]:
        return [post for post in turns[rank] if post[0] == "llm"]

    assert of_llm(0) == of_llm(1)
    assert of_llm(2) == of_llm(3)
