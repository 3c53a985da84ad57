"""Whether the global batch of `headrace orchestrate` is large enough to divide GPUs among units (Entrain's b_min)."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.reorder_service.planning.orchestration.demand import Demand

DIVIDED = "disaggregated"
"""The placement that divides the GPUs among the units. Where they share GPUs, work is spread evenly wherever it lies."""
MOST_STAGES = 16
"""GPUs of a replica that are divided: so many in Entrain's tables. Finer ones differ from batch to batch, and hardly matter."""


def stable_demand(demand: Demand, args: argparse.Namespace) -> tuple[Demand, str]:
    """Return the demand, and a note for the user, or an empty text.

    Where --global-batch names no size, it is b_min at least. Raises UserError for one below, if units may have GPUs of their own,
    unless --allow-small-batch is given: what convergence asks for may be less, and steps of that size are what is simulated.
    """
    if args.placements != "all" and DIVIDED not in (name.strip() for name in args.placements.split(",")):
        return demand, ""
    stages = min(demand.cluster.num_gpus, MOST_STAGES)
    least, is_stable = least_batch(demand, stages, args.seed)
    if demand.global_batch >= least:
        return demand, "" if is_stable else _on_edge(demand, stages)
    if args.global_batch is None:
        return dataclasses.replace(demand, global_batch=least), ""
    below = (
        f"the global batch of {demand.global_batch} samples is below {least}, from which on the units' shares of {stages} GPUs "
        "are the same in nearly all batches (Entrain's b_min), so that stages wait for each other"
    )
    if args.allow_small_batch:
        return demand, below
    raise UserError(
        f"{below}: take --global-batch {least}, leave {DIVIDED} out of --placements, or accept it with --allow-small-batch"
    )


def least_batch(demand: Demand, stages: int, seed: int) -> tuple[int, bool]:
    """Return b_min for so many stages of a replica, and whether Alg. 2 found it.

    It is at most the number of samples that are known of the data: a step that has all of them divides as all data do.
    """
    import numpy as np

    from headrace.reorder_service.planning.cost_model.stable_batch import smallest_stable_batch

    if stages < len(demand.units):
        return 1, True
    work = np.stack([unit.forward_s[min(unit.forward_s)] * (1 + unit.backward_factor) for unit in demand.units])
    found = smallest_stable_batch(work, stages, seed, most=demand.num_samples)
    return (found, True) if found is not None else (demand.num_samples, False)


def _on_edge(demand: Demand, stages: int) -> str:
    return (
        f"no global batch below all {demand.num_samples:,} samples that were read divides {stages} GPUs alike among "
        f"{', '.join(demand.unit_names)} in nearly all steps: their work is close to the edge between two divisions (Entrain's "
        "b_min), so stages of units on GPUs of their own will wait for each other"
    )
