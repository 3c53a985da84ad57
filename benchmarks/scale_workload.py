"""What the benchmark of scale has its light clients do, and their connections."""

from __future__ import annotations

import grpc

from headrace import rpc

RANKS = 1024
PREPROCESSORS = 256
STEP_S = 2.0
"""From one step of all ranks to the next."""
MICROBATCHES = 2
RANK_SAMPLES = 8
"""Of a rank in a step."""
SHARDS, ROWS = 10_000, 10_000
"""The data set: 100 million samples."""
SLOTS = 8


def own_channel(endpoint: str) -> grpc.aio.Channel:
    """A connection that no other client of this process shares."""
    return grpc.aio.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1), *rpc.CHANNEL_OPTIONS])
