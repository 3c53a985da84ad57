"""What the benchmark of scale has its light clients do, and their connections."""

from __future__ import annotations

import grpc

from headrace import rpc

HOST_RANKS = 8
"""Ranks of a host, which share a stream."""
MICROBATCHES = 2
RANK_SAMPLES = 8
"""Samples of a rank in a step."""
SHARDS, ROWS = 10_000, 10_000
"""The data set: 100 million samples."""
SLOTS = 8
WINDOW = 4
"""Steps that are planned ahead."""
TOLD_LANES = 64
"""Replicas of the LLM, which has 16 stages, in the job whose ranks are told whole plans."""
TOLD_MODES = {
    "equal lanes": "a pipeline whose units have equal numbers of replicas",
    "one lane": "a pipeline of which one unit has a replica less, so that samples of every replica meet there",
    "nodes": "nodes that commit together (--nodes): all of them hear everything",
}


def own_channel(endpoint: str) -> grpc.aio.Channel:
    """Return a channel over a connection that no other client of this process shares."""
    return grpc.aio.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1), *rpc.CHANNEL_OPTIONS])
