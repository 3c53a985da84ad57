"""What the reorder service and the nodes of a recoverable job both read off a snapshot."""

from __future__ import annotations

from headrace.v1.membership_pb2 import Snapshot

NOBODY = -1
"""In place of the rank of a node that is lost."""


def is_rerouted(snapshot: Snapshot) -> bool:
    """Whether pipelines lack nodes, and the other ones do their microbatches until the end of a step."""
    return any(stage.rank == NOBODY for pipeline in snapshot.pipelines for stage in pipeline.stages)
