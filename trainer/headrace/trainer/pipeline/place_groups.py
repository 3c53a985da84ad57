"""Which places of a topology sum gradients, activations or losses together, or exchange keys and values.

Each place is in exactly one group of each kind, which may have no other, apart from `tied_groups`. All groups come in an order
that is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from headrace.plan import LLM
from headrace.trainer.pipeline.topology import PipelineTopology, Place, UnitTopology

Groups = tuple[tuple[int, ...], ...]
"""Tuples of places by number, one for each process group."""


def data_groups(topology: PipelineTopology) -> Groups:
    """Return the data-parallel groups: all places with the same weights, which are the replicas of a stage, or of each of its
    tensor-parallel slices, and those of a replica that share its sequences."""
    return tuple(
        tuple(
            topology.number(Place(unit, replica, stage, part * size.tp + tensor_slice))
            for replica, part in product(range(size.dp), range(_parts(size)))
        )
        for unit, size in topology.units.items()
        for stage, tensor_slice in product(range(size.pp), range(size.tp))
    )


def tensor_groups(topology: PipelineTopology) -> Groups:
    """Return the tensor-parallel groups: the slices of the layers of every stage of every replica, for each part of its
    sequences."""
    return tuple(
        tuple(topology.number(Place(unit, replica, stage, part * size.tp + tensor_slice)) for tensor_slice in range(size.tp))
        for unit, size, replica, stage in _stages(topology)
        for part in range(_parts(size))
    )


def context_groups(topology: PipelineTopology) -> Groups:
    """Return the context-parallel groups: the places with the same slice of the layers of a stage of a replica, which share
    its sequences."""
    return tuple(
        tuple(topology.number(Place(unit, replica, stage, part * size.tp + tensor_slice)) for part in range(_parts(size)))
        for unit, size, replica, stage in _stages(topology)
        for tensor_slice in range(size.tp)
    )


def tied_groups(topology: PipelineTopology) -> Groups:
    """Return pairs of the LLM's first and last stage, per replica and slice: their embedding and head may be tied.

    There are no pairs if both stages are on one rank.
    """
    llm = topology.units[LLM]
    if llm.pp == 1:
        return ()
    return tuple(
        (topology.number(Place(LLM, replica, 0, number)), topology.number(Place(LLM, replica, llm.pp - 1, number)))
        for replica, number in product(range(llm.dp), range(llm.num_slices))
    )


def _stages(topology: PipelineTopology) -> Iterator[tuple[str, UnitTopology, int, int]]:
    for unit, size in topology.units.items():
        for replica, stage in product(range(size.dp), range(size.pp)):
            yield unit, size, replica, stage


def _parts(size: UnitTopology) -> int:
    """Return the number of parts of a sequence, one for each place that shares it: `cp`."""
    return size.num_slices // size.tp
