"""A script's node of a recoverable job: it joins the job's membership, and says what the script tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from headrace.v1 import membership_pb2
from headrace.v1.membership_pb2 import ModelProfile, NodesSpec, Snapshot, UnitLayers
from tests.golden.world import Call, RefusedError, World

HEARTBEAT_S = 0.3
UNITS = {"encoder": 2, "llm": 6}


def nodes_spec(num_nodes: int, max_failures: int, num_microbatches: int, on_loss: str) -> NodesSpec:
    """Return the specification of nodes of which each has memory for six of the model's eight layers, which all take as long."""
    profile = ModelProfile(
        units=[UnitLayers(unit=unit, num_layers=count) for unit, count in UNITS.items()],
        seconds=[1.0] * 8,
        layer_bytes=[1] * 8,
        memory_bytes=6,
    )
    return NodesSpec(
        num_nodes=num_nodes, max_failures=max_failures, num_microbatches=num_microbatches, profile=profile, on_loss=on_loss
    )


@dataclass(kw_only=True, eq=False)
class Node:
    """One node, with its stream and the newest snapshot that it follows."""

    world: World
    name: str
    job: str
    spec: NodesSpec
    snapshot: Snapshot = field(default_factory=Snapshot)
    """The newest snapshot that it was told."""
    news: list[str] = field(default_factory=list)
    """What it was told, in words, since it was last asked for."""
    hangs: bool = False
    """Whether it says nothing, though its stream is there."""
    has_ended: bool = False
    """Whether its process has ended."""
    _said: asyncio.Queue[membership_pb2.NodeMessage | None] = field(default_factory=asyncio.Queue)

    def join(self, generation: int) -> None:
        """Open the stream. `generation`: the snapshot that the node says it follows."""
        self._said, self.hangs, self.has_ended = asyncio.Queue(), False, False
        address = f"{self.name}:29500"
        hello = membership_pb2.NodeHello(job=self.job, node=self.name, address=address, generation=generation, spec=self.spec)
        self.say(hello=hello)
        self._stream = asyncio.create_task(self._listen())
        self._beating = asyncio.create_task(self._beat())

    def say(self, **message: Any) -> None:
        """Send a message to the service."""
        self._said.put_nowait(membership_pb2.NodeMessage(**message))

    def end(self) -> None:
        """End the process, and with it the stream."""
        self.has_ended = True
        self._beating.cancel()
        self._said.put_nowait(None)

    async def _messages(self) -> AsyncIterator[membership_pb2.NodeMessage]:
        said = self._said  # a later stream has another queue
        while (message := await said.get()) is not None:
            yield message

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if not self.hangs:
                self.say(heartbeat=membership_pb2.NodeHeartbeat())

    async def _listen(self) -> None:
        try:
            async for snapshot in self.world.membership.Join(self._messages(), Call()):
                if snapshot.generation:
                    self.snapshot = snapshot
                    self.news.append(said(snapshot))
        except RefusedError as err:
            self.news.append(str(err))
        self._beating.cancel()


def said(snapshot: Snapshot) -> str:
    """Return a snapshot in words."""
    when = "at the end of a step" if snapshot.at_step_end else "at once"
    why = snapshot.error or snapshot.change
    pipelines = "+".join(str(sum(stage.rank >= 0 for stage in pipeline.stages)) for pipeline in snapshot.pipelines)
    what = f"pipelines of {pipelines} {when}" if pipelines else f"no pipelines, {len(snapshot.nodes)} nodes left"
    return f"generation {snapshot.generation}: {what}: {why}"
