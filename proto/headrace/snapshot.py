"""Reading of snapshots, the membership and pipelines of a recoverable job, shared by the reorder service and the nodes."""

from __future__ import annotations

from headrace.v1.jobs_pb2 import NodeStatus
from headrace.v1.membership_pb2 import NodesSpec, Pipeline, Snapshot

NOBODY = -1
"""Value of a pipeline stage's `rank` in a snapshot when the stage's node is lost."""


def processes_of(spec: NodesSpec) -> int:
    """Return how many processes each node has."""
    return spec.gpus_per_node or 1


def size_in_words(pipeline: Pipeline) -> str:
    """Return how many nodes a pipeline has, such as "3", or "(2)" if it lacks one of its nodes."""
    ranks = {stage.rank for stage in pipeline.stages}
    return f"({len(ranks) - 1})" if NOBODY in ranks else str(len(ranks))


def is_rerouted(snapshot: Snapshot) -> bool:
    """Whether pipelines lack nodes, so that the other pipelines process their microbatches until the end of a step."""
    return any(stage.rank == NOBODY for pipeline in snapshot.pipelines for stage in pipeline.stages)


def node_state(node: NodeStatus, snapshot: Snapshot) -> str:
    """Return the state of a node in a word. `snapshot`: the job's newest one.

    A node `trains` or `leaves` in a pipeline, `waits` outside of one, `saves` when training has ended, or is `away` and may come
    back.
    """
    if not node.connected:
        return "away"
    if node.leaving:
        return "leaves"
    if all(member.name != node.node for member in snapshot.nodes):
        return "waits"
    return "trains" if snapshot.pipelines else "saves"
