"""Models and clusters in a few numbers, for the tests of searches for a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.orchestration.cluster import CLUSTERS, Cluster
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand

GIB = 2.0**30


def unit_of(
    name: str,
    seconds: float,
    *,
    layers: int = 8,
    parameters: float = 1e9,
    trained_share: float = 1.0,
    backward_factor: float = 2.0,
    widths: Sequence[int] = (1, 2, 4),
    slicing_loss: float = 0.1,
    kept: float = 0.0,
    sent: float = 0.0,
    samples: Sequence[float] = (1.0,),
) -> UnitDemand:
    """A unit whose step of a mean sample takes `seconds`; each doubling of the slices loses `slicing_loss` of the time.

    samples: relative sizes of the samples, with a mean of 1.
    """
    sizes = np.array(samples)
    forward = seconds / (1 + backward_factor) * sizes
    slowdown = {tp: (1 + slicing_loss) ** np.log2(tp) / tp for tp in widths}
    return UnitDemand(
        name=name,
        layers=layers,
        parameters=parameters,
        trained_share=trained_share,
        backward_factor=backward_factor,
        forward_s={tp: forward * slowdown[tp] for tp in widths},
        kept_bytes={tp: kept / tp * sizes for tp in widths},
        sent_bytes=sent * sizes,
    )


def restricted(demand: Demand, *, dp: Sequence[int] | None = None, pp: Sequence[int] | None = None) -> Demand:
    """The demand with only these numbers of replicas and of stages of every unit."""
    only_dp, only_pp = (None if numbers is None else tuple(numbers) for numbers in (dp, pp))
    return replace(demand, units=tuple(replace(unit, only_dp=only_dp, only_pp=only_pp) for unit in demand.units))


def cluster_of(nodes: int, gpus_per_node: int = 4, memory_gib: float = 48.0) -> Cluster:
    base = CLUSTERS["a40"]
    return Cluster(
        name="test",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        memory_gib=memory_gib,
        flops_per_s=base.flops_per_s,
        intra_node_bytes_per_s=base.intra_node_bytes_per_s,
        inter_node_bytes_per_s=base.inter_node_bytes_per_s,
        latency_s=1e-5,
    )


@st.composite
def demands(draw: st.DrawFn, most_gpus: int = 16, most_layers: int = 4) -> Demand:
    """Small models of one to four units on small clusters, some of which they do not fit."""
    names = draw(
        st.sampled_from(
            [(LLM,), ("encoder", LLM), ("vision", "audio", LLM), ("encoder", LLM, GENERATOR), ("vision", "audio", LLM, GENERATOR)]
        )
    )
    gpus_per_node = draw(st.sampled_from([1, 2, 4]))
    units = tuple(
        unit_of(
            name,
            draw(st.sampled_from([0.1, 0.25, 0.7, 1.0, 3.0])),
            layers=draw(st.integers(1, most_layers)),
            parameters=draw(st.sampled_from([1e8, 1e9, 4e9])),
            trained_share=draw(st.sampled_from([0.0, 0.5, 1.0])),
            backward_factor=draw(st.sampled_from([0.0, 1.0, 2.0])),
            widths=draw(st.sampled_from([(1,), (1, 2), (1, 2, 4)])),
            slicing_loss=draw(st.sampled_from([0.0, 0.1, 0.4])),
            kept=draw(st.sampled_from([0.0, 1.0, 4.0])) * GIB,
            sent=draw(st.sampled_from([0.0, 1e7])),
        )
        for name in names
    )
    chunks = draw(st.sampled_from([1, 1, 2]))
    return Demand(
        units=units,
        cluster=cluster_of(
            draw(st.integers(1, most_gpus // gpus_per_node)), gpus_per_node, draw(st.sampled_from([8.0, 24.0, 80.0]))
        ),
        global_batch=draw(st.sampled_from([1, 6, 12, 16])),
        schedule="interleaved" if chunks > 1 else draw(st.sampled_from(["1f1b", "gpipe", "eager", "zero-bubble"])),
        chunks=chunks,
    )
