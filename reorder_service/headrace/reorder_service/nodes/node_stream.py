"""The streams of snapshots to the nodes of a recoverable job, of which every process has one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from headrace.errors import HeadraceError, SupersededError, UnavailableError
from headrace.snapshot import processes_of
from headrace.v1.membership_pb2 import NodeHello, Snapshot

PULSE_S = 0.5  # silence after which a node gets an empty message: without one it looks for another service


class NodeStream:
    """The messages to a process of a node: the newest snapshot each time, skipping any replaced before it was sent."""

    def __init__(self, hello: NodeHello, heard_s: float = 0.0) -> None:
        """`hello`: the first message of the process. `heard_s`: when it came."""
        self.node, self.process, self.job, self.address = hello.node, hello.process, hello.job, hello.address
        self.heard_s, self.leaving = heard_s, hello.leaving
        self.is_whole_node = processes_of(hello.spec) == 1
        self._said_generation = hello.generation
        self._newest = Snapshot()
        self._ended = False
        self._error: HeadraceError | None = None
        self._wake = asyncio.Event()

    @property
    def generation(self) -> int:
        """The newest snapshot that the process follows or is told; 0: it holds nothing of the model."""
        return max(self._said_generation, self._newest.generation)

    def tell(self, snapshot: Snapshot) -> None:
        self._newest = snapshot
        self._wake.set()

    def end(self, error: HeadraceError | None = None) -> None:
        """End the stream after the newest snapshot, with the error if there is one."""
        self._ended, self._error = True, error
        self._wake.set()

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield each newer snapshot, and an empty one after PULSE_S without news. Raises the error that `end` was given."""
        told = 0
        while True:
            self._wake.clear()
            newest = self._newest
            if newest.generation > told:
                told = newest.generation
                yield newest
            elif self._ended:
                break
            else:
                try:
                    async with asyncio.timeout(PULSE_S):
                        await self._wake.wait()
                except TimeoutError:
                    yield Snapshot()
        if self._error is not None:
            raise self._error


class NodeStreams:
    """The present streams of all processes of a job's nodes."""

    def __init__(self) -> None:
        self._of_node: dict[str, dict[int, NodeStream]] = {}

    def __bool__(self) -> bool:
        return bool(self._of_node)

    def __iter__(self) -> Iterator[NodeStream]:
        return iter([stream for streams in self._of_node.values() for stream in streams.values()])

    def __contains__(self, stream: NodeStream) -> bool:
        return self._of_node.get(stream.node, {}).get(stream.process) is stream

    def of(self, node: str) -> list[NodeStream]:
        """Return the streams of a node's processes, in the order of these."""
        return [stream for _, stream in sorted(self._of_node.get(node, {}).items())]

    def add(self, stream: NodeStream) -> None:
        """Take in a stream, and end a former one of the same process with SupersededError."""
        streams = self._of_node.setdefault(stream.node, {})
        if (former := streams.get(stream.process)) is not None:
            former.end(SupersededError(f"node {stream.node!r} of job {stream.job!r} joined again from elsewhere"))
        streams[stream.process] = stream

    def discard(self, stream: NodeStream) -> bool:
        """Remove a stream, and return whether it was there."""
        if stream not in self:
            return False
        del self._of_node[stream.node][stream.process]
        if not self._of_node[stream.node]:
            del self._of_node[stream.node]
        return True

    def silent(self, node: str, why: str) -> str:
        """Return why a node counts as silent, with the process that is, where it has several."""
        streams = self.of(node)
        return f"process {min(streams, key=lambda one: one.heard_s).process}: {why}" if len(streams) > 1 else why

    def lose(self, node: str, why: str) -> None:
        """End and remove the streams of a node that is lost.

        A process that is its whole node may join again. Several end, as those that live have lost their sibling's layers.
        """
        for stream in self._of_node.pop(node, {}).values():
            if stream.is_whole_node:
                stream.end(UnavailableError(f"node {node!r} was {why} and taken for lost: join again"))
            else:
                stream.end(HeadraceError(f"node {node!r} was lost ({why}): all of its processes end"))

    def end(self, error: HeadraceError | None) -> None:
        """End and remove all streams."""
        for stream in self:
            stream.end(error)
        self._of_node.clear()
