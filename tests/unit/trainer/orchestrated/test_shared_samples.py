"""The way of samples that several ranks of the LLM share: in a portion of each, in one order, and handed to each by encoders."""

from __future__ import annotations

import pytest

from headrace.errors import UserError
from headrace.plan import LLM, Microbatch, StepPlan, Topology
from headrace.trainer.orchestrated.sequence_cargo import check_shares
from headrace.trainer.orchestrated.unit_roots import OwnLlm
from headrace.trainer.pipeline.routes import Routes
from tests.verify.context_models import VOCABULARY

RANKS = 4


def routes_of(degrees: dict[int, int], llm: list[tuple[int, ...]], vision: list[tuple[int, ...]]) -> Routes:
    """Of one microbatch, whose samples are on these ranks."""
    topology = Topology(replicas=RANKS, microbatches=1, stages={"vision": 1, LLM: 1})
    replicas = [[Microbatch(units={"vision": v, LLM: t})] for v, t in zip(vision, llm, strict=True)]
    plan = StepPlan(strategy="by hand", seed=0, topology=topology, replicas=replicas, degrees=degrees)
    plan.check()
    return Routes(plan, dict.fromkeys(topology.stages, RANKS))


@pytest.fixture
def routes() -> Routes:
    llm = [(7, 1, 3), (8,), (2, 5), (4, 6)]
    vision = [(2,), (1, 3), (4, 5, 6, 7), (8,)]
    return routes_of({1: 4, 3: 2, 5: 2, 2: 2}, llm, vision)


def test_a_shared_sample_is_in_a_portion_of_each_of_its_ranks(routes: Routes) -> None:
    portions = [[portion.samples for portion in routes.portions(LLM, rank)] for rank in range(RANKS)]
    assert portions == [[(3, 1, 7)], [(3, 1, 8)], [(1, 2, 5)], [(1, 2, 5, 4, 6)]]
    assert [portion.samples for portion in routes.portions("vision", 2)] == [(4, 5, 6, 7)], "encoders share nothing"


def test_ranks_meet_in_one_order_of_their_groups(routes: Routes) -> None:
    """Rank 0 begins with those of 0 and 1, and goes on with those of all, as rank 1 does; of others nobody waits for two."""
    assert routes.shared_by(0) == ((0, 1), (0, 1, 2, 3), (2, 3))
    assert routes.sharers(1, 2) == range(4)
    assert routes.sharers(8, 1) == range(1, 2)
    orders = []
    for rank in range(RANKS):
        [portion] = routes.portions(LLM, rank)
        groups = [tuple(routes.sharers(sample, rank)) for sample in portion.samples]
        orders.append(list(dict.fromkeys(group for group in groups if len(group) > 1)))
    assert all(order == sorted(order) for order in orders)


def test_an_encoder_hands_a_shared_sample_to_each_rank_that_has_it(routes: Routes) -> None:
    [portion] = routes.portions("vision", 1)
    handed = [(handover.target.replica, handover.samples) for handover in routes.out_of(portion)]
    assert handed == [(0, (1, 3)), (1, (1, 3)), (2, (1,)), (3, (1,))]
    [target] = routes.portions(LLM, 3)
    assert [(handover.source.replica, handover.samples) for handover in routes.into(target)] == [
        (0, (2,)),
        (1, (1,)),
        (2, (4, 5, 6)),
    ]


def test_more_ranks_than_samples_share_the_few() -> None:
    routes = routes_of({9: 2}, [(9,), (), (4,), ()], [(), (9, 4), (), ()])
    assert [[portion.samples for portion in routes.portions(LLM, rank)] for rank in range(RANKS)] == [[(9,)], [(9,)], [(4,)], []]


def test_a_module_of_ones_own_takes_whole_sequences() -> None:
    import torch

    with pytest.raises(UserError, match="a module of one's own takes whole sequences: leave out cp"):
        check_shares(OwnLlm(torch.nn.Identity(), VOCABULARY))
