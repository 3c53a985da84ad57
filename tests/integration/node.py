"""A node of a recoverable job that trains nothing: it joins, and prints the generation and the nodes of every snapshot.

python -m tests.integration.node ENDPOINT JOB NAME
"""

from __future__ import annotations

import sys

from headrace.trainer.recovery.membership_client import MembershipClient
from headrace.v1.membership_pb2 import ModelProfile, NodeHello, NodesSpec, UnitLayers

PROFILE = ModelProfile(units=[UnitLayers(unit="llm", num_layers=4)], seconds=[1.0] * 4, layer_bytes=[1] * 4, memory_bytes=4)
SPEC = NodesSpec(num_nodes=4, max_failures=1, num_microbatches=4, profile=PROFILE)
"""Four nodes, each of which could hold the whole model."""


def membership(endpoint: str, job: str, name: str) -> MembershipClient:
    """Of a node that begins."""
    return MembershipClient(endpoint, NodeHello(job=job, node=name, address="127.0.0.1:1", spec=SPEC))


def main(endpoint: str, job: str, name: str) -> None:
    member = membership(endpoint, job, name)
    member.open()
    generation = 0
    while True:
        snapshot = member.wait(generation)
        generation = snapshot.generation
        print(generation, *(node.name for node in snapshot.nodes), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
