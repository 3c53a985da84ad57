"""How long GPUs send to each other in collectives, and how much of that computing hides: the same for every placement.

Trainers send in parts, each while they compute with another. Pipelines gather a layer's weights while those in front of it run
their first forward of a step, and sum a layer's gradients while those in front of it run their last backward. Sharded ranks
(FSDP) do so in every microbatch. So sending takes no time of its own as far as computing takes longer, but for one part of it,
the first or the last, with which nothing can be computed yet, or any more.
"""

from __future__ import annotations

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.orchestration.cluster import Cluster


def collective_s(num_bytes: Floats | float, size: Ints | int, per_node: Ints | int, cluster: Cluster) -> Floats:
    """Return the seconds of an all-gather or a reduce-scatter of so many bytes in all among `size` GPUs.

    per_node: how many GPUs of the group share a node, where it has so many; groups of its other GPUs exchange at the same time.
    A node receives what the others have, by the share of its links that belongs to the group, while its own GPUs pass it on to
    each other.
    """
    num_bytes, size = np.asarray(num_bytes, np.float64), np.asarray(size)
    inside = np.maximum(1, np.minimum(size, per_node))
    nodes = -(-size // inside)
    between_s = num_bytes * (nodes - 1) / nodes / (cluster.inter_node_bytes_per_s * inside)
    within_s = num_bytes * (inside - 1) / inside / cluster.intra_node_bytes_per_s
    latency_s = cluster.latency_s * np.ceil(np.log2(np.maximum(size, 1)))
    seconds: Floats = np.where((size > 1) & (num_bytes > 0), np.maximum(between_s, within_s) + latency_s, 0.0)
    return seconds


def exposed_s(sent_s: Floats | float, computed_s: Floats | float, parts: Ints | int) -> Floats:
    """Return how much longer computing and sending take together than computing alone.

    Both are in so many equal parts. With 4 parts, 8 s of sending under 4 s of computing are 5 s more, and under 40 s 2 s more.
    """
    sent_s, parts = np.asarray(sent_s, np.float64), np.asarray(parts)
    seconds: Floats = np.maximum(sent_s - np.asarray(computed_s) * (parts - 1) / parts, sent_s / parts)
    return seconds
