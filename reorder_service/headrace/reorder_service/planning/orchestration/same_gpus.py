"""A batch of disaggregated pipelines in the other placements that there are, on as many GPUs.

| placement      | GPUs                                                                                                    |
|----------------|---------------------------------------------------------------------------------------------------------|
| disaggregated  | each unit has its own, as the batch says                                                                |
| nested         | the LLM has those of the encoders too, and these, each in one stage, are on all of them, in its bubbles |
| encoders-first | likewise, but in front of the LLM's actions and behind them                                             |
| colocated      | every GPU has all units (FSDP)                                                                          |

What a sample costs is the same everywhere, and the mean size of the LLM's microbatches, as far as whole numbers allow. On shared
GPUs the LLM has the least number of stages that divides them all and is not below its own, so that none holds more of it than
before. This is one layout each, without links, weights and the exchange of gradients; `headrace_search` looks through them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.execution_spec import SharingOrder
from headrace.plan import LLM, Topology
from headrace.reorder_service.planning.batch import Batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.orchestration.candidate import SHARING, Placement
from headrace.reorder_service.planning.sharing import Sharing


def placed(batch: Batch, placement: Placement, most_stages: int | None = None) -> Batch:
    """Return the batch in a placement, planned as its trainers can run it: in pipelines, units may be on different replicas.

    most_stages: of the LLM, if its layers are known. Raises ValueError where the placement cannot have the batch's GPUs.
    """
    if placement == "disaggregated":
        return replace(batch, execution=replace(batch.execution, may_cross_replicas=True))
    gpus = gpus_of(batch)
    if placement in SHARING:
        return _shared(batch, SHARING[placement], gpus, most_stages)
    ranks = sum(gpus.values())
    topology = replace(batch.topology, replicas=ranks, microbatches=_microbatches(batch, ranks))
    execution = Execution(colocated="microbatch", backward_factors=batch.execution.backward_factors)
    return replace(batch, topology=topology, execution=execution)


def gpus_of(batch: Batch) -> dict[str, int]:
    """Return the number of GPUs of each unit of a batch whose units have GPUs of their own: a stage of a replica is on one."""
    stages = batch.topology.stages
    return {unit: replicas * stages[unit] for unit, replicas in zip(batch.units, batch.unit_replicas, strict=True)}


def _shared(batch: Batch, order: SharingOrder, gpus: Mapping[str, int], most_stages: int | None) -> Batch:
    topology, execution = batch.topology, batch.execution
    if not topology.encoders:
        raise ValueError(f"there is no encoder to share the GPUs of {LLM!r} with")
    sharers = (*topology.encoders, LLM)
    ranks, least = sum(gpus[unit] for unit in sharers), topology.stages[LLM]
    most = ranks if most_stages is None else most_stages
    stages = next((number for number in range(least, most + 1) if ranks % number == 0), None)
    if stages is None:
        raise ValueError(
            f"no number of stages from {least} to {most} divides the {ranks} GPUs of encoders and {LLM!r}: give another number "
            "of replicas or stages"
        )
    replicas = ranks // stages
    own = dict(zip(batch.units, batch.unit_replicas, strict=True)) | dict.fromkeys(topology.encoders, ranks)
    return replace(
        batch,
        topology=Topology(
            replicas=replicas,
            microbatches=_microbatches(batch, replicas),
            stages={unit: stages if unit == LLM else 1 if unit in sharers else n for unit, n in topology.stages.items()},
        ),
        execution=replace(
            execution,
            may_cross_replicas=True,
            unit_replicas={unit: number for unit, number in own.items() if unit != LLM and number != replicas},
            sharing=Sharing(order=order, slices=dict.fromkeys(sharers, 1)),
        ),
    )


def _microbatches(batch: Batch, replicas: int) -> int:
    """Return of how many microbatches of so many replicas the LLM takes about as many samples each as of the batch's."""
    return max(1, round(batch.topology.replicas * batch.topology.microbatches / replicas))
