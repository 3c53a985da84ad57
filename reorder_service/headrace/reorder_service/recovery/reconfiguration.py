"""Form new pipelines after nodes were lost or joined (Oobleck, dissertation section 2.5.1), and find the layers that nodes lack.

A pipeline that lost nodes continues with the template for its remaining nodes: simple reinstantiation. If they are fewer than the
smallest template needs, it takes nodes that joined, then borrows from the largest pipelines, and if those can spare too few, the
two smallest pipelines are merged. Joined nodes that are still free form a new pipeline if they are enough for one; otherwise the
smallest pipelines grow. Among choices between equally large pipelines, the one that copies the fewest bytes is taken.

With (f + 1) n_0 nodes or more, for f failures to survive and n_0 nodes in the smallest template, at least f + 1 pipelines result:
a merge happens only while there are more (appendix A.2).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from scipy.optimize import linear_sum_assignment

from headrace.errors import UnrecoverableError
from headrace.reorder_service.recovery.pipeline_templates import NodeSpecification, Template, Templates


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A template on named nodes. Raises ValueError if their number is not the template's."""

    template: Template
    nodes: tuple[str, ...]
    """Names of the nodes in pipeline order."""

    def __post_init__(self) -> None:
        if len(self.nodes) != self.template.num_nodes:
            raise ValueError(f"a template of {self.template.num_nodes} nodes got {len(self.nodes)}: {', '.join(self.nodes)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfiguration:
    """The new pipelines, and the layers that their nodes must copy."""

    pipelines: tuple[Pipeline, ...]
    """Unchanged pipelines keep their order, and have the same nodes in the same places."""
    missing: Mapping[str, Mapping[int, tuple[str, ...]]]
    """Node that lacks layers -> layer to copy -> nodes that have it."""
    copied_bytes: int
    idle: tuple[str, ...]
    """Nodes that no template can use: none while there are no more than at the start. They join again with the next change."""


# (pipeline, number of nodes), rising: old pipelines by their place, then new ones. Pipelines merged into another are absent.
Sizes = tuple[tuple[int, int], ...]

# Tells an old pipeline from others: its former number of nodes, and the places of those that remain.
Origin = tuple[int, ...]


def reconfigure(
    templates: Templates,
    pipelines: Sequence[Pipeline],
    *,
    lost: Collection[str] = (),
    joined: Sequence[str] = (),
    max_pipelines: int | None = None,
    sizes: Sequence[int] = (),
) -> Reconfiguration:
    """Return the pipelines after a change of nodes, and the layers that nodes must copy.

    lost: may include nodes of no pipeline, and nodes that joined. max_pipelines: joined nodes form no new pipeline beyond this
    number, because there are only so many microbatches; None: no limit. sizes: number of nodes of each pipeline to form, together
    no more than there are, for example from an `Instantiation`. It replaces the rules of this module, whose pipelines may be
    slower after many changes. Intact pipelines of these sizes stay; of the others, the one with the most nodes left gets the
    largest size.

    Raises UnrecoverableError if a layer has no copy left, or too few nodes remain to lose as many again; ValueError if a node
    that joined is in a pipeline already.
    """
    gone = frozenset(lost)
    fresh = tuple(node for node in joined if node not in gone)
    _check(templates, pipelines, gone, len(fresh))
    alive = [tuple(node for node in pipeline.nodes if node not in gone) for pipeline in pipelines]
    if known := {node for nodes in alive for node in nodes}.intersection(fresh):
        raise ValueError(f"nodes that joined are in a pipeline already: {', '.join(sorted(known))}")
    origins = [(len(old.nodes), *(i for i, node in enumerate(old.nodes) if node not in gone)) for old in pipelines]
    choices = [_given(origins, sizes)] if sizes else _target_sizes(templates.specification, origins, len(fresh), max_pipelines)
    placings = [_place(templates, pipelines, alive, fresh, sizes) for sizes in choices]
    copied_bytes, _, placed = min(placings, key=lambda placing: placing[:2])
    holders = _holders(pipelines, gone)
    missing = {}
    for pipeline in placed:
        for position, node in enumerate(pipeline.nodes):
            lacking = [layer for layer in pipeline.template.layers_of(position) if node not in holders[layer]]
            if lacking:
                missing[node] = {layer: holders[layer] for layer in lacking}
    used = {node for pipeline in placed for node in pipeline.nodes}
    idle = tuple(node for node in (*(node for nodes in alive for node in nodes), *fresh) if node not in used)
    return Reconfiguration(pipelines=placed, missing=missing, copied_bytes=copied_bytes, idle=idle)


def _check(templates: Templates, pipelines: Sequence[Pipeline], gone: frozenset[str], num_fresh: int) -> None:
    """Raise UnrecoverableError if training cannot go on."""
    specification = templates.specification
    without = [layer for layer, nodes in enumerate(_holders(pipelines, gone)) if not nodes]
    if without:
        former = sorted({node for layer in without for node in _holders(pipelines, frozenset())[layer]})
        raise UnrecoverableError(
            f"no copy is left of {_spans(without)} of the model, which were on {', '.join(former)}: bring back nodes that still "
            f"have them, or go on from a checkpoint"
        )
    left = num_fresh + sum(node not in gone for pipeline in pipelines for node in pipeline.nodes)
    if left < specification.least_nodes:
        raise UnrecoverableError(
            f"{left} nodes are left, but {specification.max_failures + 1} replicas need {specification.smallest} each: "
            f"add {specification.least_nodes - left} or more nodes; every layer still has a copy"
        )


def _spans(layers: Sequence[int]) -> str:
    """Name layers by ranges: [3, 4, 5, 9] becomes "layers 3-5, 9"."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return "layers " + ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True))


def _holders(pipelines: Sequence[Pipeline], gone: frozenset[str]) -> list[tuple[str, ...]]:
    """Return, for each of the L layers, the nodes that have it and are not gone."""
    holders: list[list[str]] = [[] for _ in range(pipelines[0].template.stages[-1].layers.stop)]
    for pipeline in pipelines:
        for position, node in enumerate(pipeline.nodes):
            if node not in gone:
                for layer in pipeline.template.layers_of(position):
                    holders[layer].append(node)
    return [tuple(nodes) for nodes in holders]


def _given(origins: Sequence[Origin], sizes: Sequence[int]) -> Sizes:
    """Keep intact pipelines whose size is in `sizes`; the largest other size goes to the pipeline with the most nodes left."""
    rest = sorted(sizes, reverse=True)
    kept = {}
    for i, (size, *left) in enumerate(origins):
        if len(left) == size and size in rest:
            rest.remove(size)
            kept[i] = size
    changed = sorted((i for i in range(len(origins)) if i not in kept), key=lambda i: -len(origins[i]))
    places = [*changed, *range(len(origins), len(origins) + len(rest))]
    return tuple(sorted({**kept, **dict(zip(places, rest, strict=False))}.items()))


def _target_sizes(
    specification: NodeSpecification, origins: Sequence[Origin], num_free: int, max_pipelines: int | None
) -> list[Sizes]:
    """Return all outcomes of the module's rules; they differ only by choices between equally large pipelines."""
    start: Sizes = tuple((i, len(origin) - 1) for i, origin in enumerate(origins))
    states, seen, outcomes = [(start, num_free)], {(start, num_free)}, []
    while states:
        sizes, free = states.pop()
        room = max_pipelines is None or len(sizes) < max_pipelines
        steps = _steps(specification, origins, dict(sizes), free, room=room)
        if not steps:
            outcomes.append(sizes)
        for changed, left in steps:
            state = (tuple(sorted(changed.items())), left)
            if state not in seen:
                seen.add(state)
                states.append(state)
    return outcomes


def _steps(
    specification: NodeSpecification, origins: Sequence[Origin], sizes: dict[int, int], free: int, *, room: bool
) -> list[tuple[dict[int, int], int]]:
    """Return the equally good next steps towards pipelines that all have a template and leave no node free, empty at the end.

    Each step is the new sizes and the number of nodes still free. room: whether there may be one more pipeline.
    """
    smallest, largest = specification.smallest, specification.largest
    least, most = min(sizes.values()), max(sizes.values())
    spare = sum(max(0, size - smallest) for size in sizes.values())
    new = max(len(origins), 1 + max(sizes))
    if least < smallest:
        short = max(size for size in sizes.values() if size < smallest)
        if free:
            return [({**sizes, i: short + 1}, free - 1) for i in _alike(sizes, origins, short)]
        if short + spare >= smallest:
            lenders = _alike(sizes, origins, most)
            return [({**sizes, i: short + 1, k: most - 1}, 0) for i in _alike(sizes, origins, short) for k in lenders]
        return _mergers(sizes, origins)
    if most > largest:
        return [({**sizes, i: largest}, free + most - largest) for i in _alike(sizes, origins, most)[:1]]
    if free >= smallest and room:
        made = min(free, largest)
        return [({**sizes, new: made}, free - made)]
    growing = min((size for size in sizes.values() if size < largest), default=None)
    if free and growing:
        return [({**sizes, i: growing + 1}, free - 1) for i in _alike(sizes, origins, growing)]
    if free and free + spare >= smallest and room:
        return [({**sizes, new: free}, 0)]  # it borrows the nodes it lacks
    return []


def _mergers(sizes: dict[int, int], origins: Sequence[Origin]) -> list[tuple[dict[int, int], int]]:
    """Return the ways to merge the smallest pipeline into the next smallest."""
    first, second = sorted(sizes.values())[:2]
    merged = []
    for i in _alike(sizes, origins, first):
        others = {k: size for k, size in sizes.items() if k != i}
        merged += [({**others, k: first + second}, 0) for k in _alike(others, origins, second)]
    return merged


def _alike(sizes: Mapping[int, int], origins: Sequence[Origin], size: int) -> list[int]:
    """Return the first pipeline of each origin among those of `size`: the others of that origin would have the same outcome."""
    firsts: dict[Origin, int] = {}
    for i in sizes:
        if sizes[i] == size:
            firsts.setdefault(origins[i] if i < len(origins) else (), i)
    return list(firsts.values())


def _place(
    templates: Templates, pipelines: Sequence[Pipeline], alive: Sequence[tuple[str, ...]], fresh: Sequence[str], sizes: Sizes
) -> tuple[int, int, tuple[Pipeline, ...]]:
    """Assign nodes to pipelines of `sizes`; return the bytes to copy, the number of pipelines that change, and the pipelines.

    Intact pipelines stay as they are. The other nodes go where they lack the fewest bytes in total, an assignment problem, and on
    a tie into their own pipeline.
    """
    whole = {i for i, size in sizes if i < len(pipelines) and size == len(alive[i]) == len(pipelines[i].nodes)}
    layers_of = {node: old.template.layers_of(place) for old in pipelines for place, node in enumerate(old.nodes)}
    movable = [(i, node) for i, nodes in enumerate(alive) if i not in whole for node in nodes] + [(-1, node) for node in fresh]
    slots = [(i, templates.of_size[size].layers_of(place)) for i, size in sizes if i not in whole for place in range(size)]
    before = np.append(0, np.cumsum(templates.layer_bytes))
    lacking = np.empty((len(movable), len(slots)), np.int64)
    elsewhere = np.empty(lacking.shape, np.int64)
    for row, (home, node) in enumerate(movable):
        held = layers_of.get(node, range(0))
        for column, (i, layers) in enumerate(slots):
            first = max(held.start, layers.start)
            kept = before[max(first, min(held.stop, layers.stop))] - before[first]
            lacking[row, column] = before[layers.stop] - before[layers.start] - kept
            elsewhere[row, column] = i != home
    rows, columns = linear_sum_assignment(lacking * (len(slots) + 1) + elsewhere)
    node_in = {int(column): movable[row][1] for row, column in zip(rows, columns, strict=True)}
    nodes = (node_in[column] for column in range(len(slots)))
    placed = tuple(
        pipelines[i] if i in whole else Pipeline(template=templates.of_size[size], nodes=tuple(islice(nodes, size)))
        for i, size in sizes
    )
    return int(lacking[rows, columns].sum()), len(placed) - len(whole), placed
