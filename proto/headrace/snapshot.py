"""Reading of snapshots, the membership and pipelines of a recoverable job, shared by the reorder service and the nodes."""

from __future__ import annotations

from headrace.v1.membership_pb2 import Snapshot

NOBODY = -1
"""Value of a pipeline stage's `rank` in a snapshot when the stage's node is lost."""


def is_rerouted(snapshot: Snapshot) -> bool:
    """Whether pipelines lack nodes, so that the other pipelines process their microbatches until the end of a step."""
    return any(stage.rank == NOBODY for pipeline in snapshot.pipelines for stage in pipeline.stages)
