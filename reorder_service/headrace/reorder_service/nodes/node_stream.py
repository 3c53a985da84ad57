"""The stream of snapshots to one node of a recoverable job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from headrace.errors import HeadraceError
from headrace.v1.membership_pb2 import Snapshot

PULSE_S = 0.5  # silence after which a node gets an empty message: without one it looks for another service


class NodeStream:
    """The messages to one node: the newest snapshot each time, skipping any replaced before it was sent."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._newest = Snapshot()
        self._ended = False
        self._error: HeadraceError | None = None
        self._wake = asyncio.Event()

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
