"""Models to plan for, every mapping of a small one, and templates that need no model."""

from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise, product

import numpy as np
from hypothesis import strategies as st

from headrace.reorder_service.recovery.pipeline_templates import ModelProfile, NodeSpecification, Stage, Template, Templates


def profile_of(
    seconds: list[list[float]],
    *,
    units: dict[str, int] | None = None,
    gpu_bytes: list[list[int]] | None = None,
    memory: int = 10**9,
    gpus_per_node: int = 0,
) -> ModelProfile:
    table = np.array(seconds, np.float64)
    return ModelProfile(
        units={"llm": len(table)} if units is None else units,
        seconds=table,
        gpu_bytes=np.ones(table.shape, np.int64) if gpu_bytes is None else np.array(gpu_bytes, np.int64),
        memory_bytes=memory,
        gpus_per_node=gpus_per_node,
    )


@st.composite
def profiles(draw: st.DrawFn, *, num_layers: int = 5, num_gpus: int = 3) -> ModelProfile:
    """Small whole seconds, so that many mappings are equally fast; GPUs in any number may be better or worse.

    Where fewer GPUs share a stage than a node has, each node has several.
    """
    layers, gpus = draw(st.integers(1, num_layers)), draw(st.integers(1, num_gpus))
    table = st.lists(st.lists(st.integers(1, 6), min_size=gpus, max_size=gpus), min_size=layers, max_size=layers)
    encoder = draw(st.integers(0, layers - 1))
    units = {"encoder": encoder, "llm": layers - encoder} if encoder else {"llm": layers}
    memory, gpus_per_node = draw(st.sampled_from([4, 7, 12, 100])), draw(st.integers(gpus, num_gpus))
    return profile_of(draw(table), units=units, gpu_bytes=draw(table), memory=memory, gpus_per_node=gpus_per_node)


Mapping = list[tuple[int, int, int, int]]
"""Node, number of GPUs, first and end layer of each stage."""


def every_mapping(profile: ModelProfile, num_nodes: int) -> Iterator[Mapping]:
    num_layers, num_gpus = profile.seconds.shape
    allowed = {
        stage
        for stage in product(range(1, num_gpus + 1), range(num_layers), range(1, num_layers + 1))
        if stage[1] < stage[2] and stage_allowed(profile, *stage)
    }
    of_node = [counts for counts in compositions(profile.gpus_per_node or num_gpus) if max(counts) <= num_gpus]
    for nodes in product(of_node, repeat=num_nodes):
        gpus = [(node, count) for node, counts in enumerate(nodes) for count in counts]
        for cuts in combinations(range(1, num_layers), len(gpus) - 1):
            bounds = pairwise((0, *cuts, num_layers))
            stages = [(node, count, first, end) for (node, count), (first, end) in zip(gpus, bounds, strict=True)]
            if all(stage[1:] in allowed for stage in stages):
                yield stages


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """(1, 1), (2,) of 2"""
    for length in range(1, total + 1):
        for cuts in combinations(range(1, total), length - 1):
            yield tuple(b - a for a, b in pairwise((0, *cuts, total)))


def stage_allowed(profile: ModelProfile, gpus: int, first: int, end: int) -> bool:
    return not any(first < start < end for start in accumulate(profile.units.values())) and (
        int(profile.gpu_bytes[first:end, gpus - 1].sum()) <= profile.memory_bytes
    )


def breakdown(profile: ModelProfile, mapping: Mapping) -> float:
    """T1 + T2 + T3 with four microbatches a stage, word for word."""
    times = [float(profile.seconds[first:end, gpus - 1].sum()) for _, gpus, first, end in mapping]
    slowest = max(range(len(times)), key=lambda k: (times[k], k))
    t1 = sum(times)
    t2 = (4 * len(times) - len(times) + slowest - 1) * times[slowest]
    t3 = sum(times[slowest:])
    return t1 + t2 + t3


def templates_of(
    num_nodes: int, max_failures: int, smallest: int, num_layers: int, *, layer_bytes: list[int] | None = None
) -> Templates:
    """A stage on each node, the layers as even as can be, a second each."""
    largest = num_nodes - max_failures * smallest
    of_size = {}
    for size in range(smallest, largest + 1):
        bounds = [num_layers * node // size for node in range(size + 1)]
        of_size[size] = Template(
            stages=tuple(
                Stage(unit="llm", node=node, gpus=1, layers=range(first, end), seconds=float(end - first))
                for node, (first, end) in enumerate(pairwise(bounds))
            )
        )
    specification = NodeSpecification(num_nodes=num_nodes, max_failures=max_failures, smallest=smallest, largest=largest)
    sizes = np.ones(num_layers, np.int64) if layer_bytes is None else np.array(layer_bytes, np.int64)
    return Templates(specification=specification, of_size=of_size, layer_bytes=sizes)
