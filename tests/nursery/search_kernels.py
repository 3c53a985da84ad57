"""`python -m tests.nursery.search_kernels`: compile what no service compiles as it starts, and what commands and tests run.

Each call is the smallest that reaches all kernels of a module. Where one is missing nothing fails: a test compiles it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace.attention_mask import AttentionMask, field
from headrace.block_distribution import distribute
from headrace.plan import LLM, Topology
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.bubbles.bubble_planner import make_problem
from headrace.reorder_service.planning.bubbles.coarse_schedule import coarse
from headrace.reorder_service.planning.bubbles.encoder_plans import encoder_plans
from headrace.reorder_service.planning.bubbles.filled_schedule import filled, mappings
from headrace.reorder_service.planning.bubbles.layer_kernels import Encoder, LayerKernels, Passes
from headrace.reorder_service.planning.bubbles.llm_timeline import LlmPlan, time_llm
from headrace.reorder_service.planning.bubbles.moved_schedule import moved
from headrace.reorder_service.planning.context.degree_plan import plan_degrees
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.orchestration.cluster import CLUSTERS
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.searches import disttrain_exact, disttrain_relaxed
from headrace.reorder_service.planning.search.unequal_speeds import share_by_speed
from headrace.reorder_service.planning.sharing import Sharing
from headrace.reorder_service.planning.simulation.chained_step import chained_step_s, interleaved_actions
from headrace.reorder_service.planning.simulation.shared_ranks import simulate_shared

ENCODER = "vision"


def masks() -> None:
    """Counts and blocks of an attention mask, and who computes which."""
    causal = field(sees=1, own=0, segment=1, causal=True)
    image = field(sees=3, own=1, segment=1, group=1, whole_group=True)
    mask = AttentionMask(fields=np.array([causal, image, image, causal]))
    mask.row_counts()
    mask.block_map(2)
    distribute(mask.touched_blocks(1), 2)


def searches() -> None:
    """The exact and the relaxed search for a placement."""
    ones = np.ones(2)
    units = tuple(
        UnitDemand(
            name=name,
            layers=2,
            parameters=1e8,
            trained_share=1.0,
            backward_factor=2.0,
            forward_s={1: ones},
            kept_bytes={1: ones},
            sent_bytes=ones,
        )
        for name in (ENCODER, LLM)
    )
    demand = Demand(units=units, cluster=replace(CLUSTERS["a40"], nodes=1, gpus_per_node=4), global_batch=4)
    disttrain_exact.search(demand)
    disttrain_relaxed.search(demand)


def bubbles() -> None:
    """Every way to place an encoder's kernels into an LLM's bubbles."""
    kernels = LayerKernels.of([("compute", 1.0), ("communicate", 0.5)])
    layer = Passes(forward=kernels, backward=kernels)
    llm = LlmPlan(replicas=1, stages=2, tensor=1, microbatches=3, layers=2, layer=layer)
    encoders = [Encoder(name=ENCODER, layers=2, layer={1: layer}, weights=1)]
    for plan in encoder_plans(encoders, llm, 1e12):
        problem = make_problem(llm, time_llm(llm), encoders, plan)
        coarse(problem)
        moved(problem)
        for pipeline_of in mappings(problem):
            filled(problem, pipeline_of)


def shared_ranks() -> None:
    """Steps of encoders on the ranks of the LLM, in both orders, and of baselines in which they follow each other."""
    samples = np.arange(4)
    costs = dict.fromkeys((ENCODER, LLM), np.linspace(1.0, 2.0, samples.size))
    topology = Topology(replicas=1, microbatches=2, stages={ENCODER: 1, LLM: 2})
    batch = make_batch(samples, costs, topology, 0, execution=Execution(unit_replicas={ENCODER: 2}))
    slots = np.array([[0, 1, 2, 3], [0, 0, 1, 1]])
    for order in ("colocated", "nested"):
        simulate_shared(batch, slots, Sharing(order=order, slices={ENCODER: 1, LLM: 1}))
    chained_step_s(np.ones((2, 1, 2, 2, 1)), interleaved_actions(2, 2, 1))


def shares() -> None:
    """Sequences on several ranks, and samples on replicas that are not as fast as each other."""
    plan_degrees(np.ones((3, 2)), np.array([1, 1, 2]), 1)
    samples = np.arange(4)
    topology = Topology(replicas=2, microbatches=2, stages={LLM: 1})
    share_by_speed(make_batch(samples, {LLM: np.ones(samples.size)}, topology, 0), np.array([1.0, 2.0]))


def warm_up() -> None:
    """Compile them, or load them from numba's cache."""
    masks()
    bubbles()
    searches()
    shared_ranks()
    shares()


if __name__ == "__main__":
    warm_up()
