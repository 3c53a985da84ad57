"""The wires between simulated processes: delay, loss of a connection, silence in one direction or both.

As TCP does, a wire keeps the order of what is sent over one stream, and brings what was sent while it was silent once it carries
again. As by gRPC's keepalive, a connection over a silent wire, or to a process that hangs, is given up after some seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from tests.simulation.virtual_loop import Process, VirtualLoop

KEEPALIVE_S = (3.0, 5.0)  # a connection is given up after so much silence: KEEPALIVE_MS and KEEPALIVE_TIMEOUT_MS of headrace.rpc
LATENCY_S = (0.0001, 0.002)


class Breakable(Protocol):
    """What goes over a connection, and hears that it broke."""

    def broken(self, side: Process) -> None: ...


@dataclass(eq=False)
class Stream:
    """One direction of a call: what is sent over it arrives in order."""

    arrives_s: float = 0.0


@dataclass(eq=False)
class Connection:
    """A connection between two processes, and the calls that go over it."""

    client: Process
    server: Process
    calls: dict[Breakable, None] = field(default_factory=dict)
    open_at: dict[Process, bool] = field(default_factory=dict)
    """Whether a side takes it for open."""
    believed: dict[str, bool] = field(default_factory=dict)
    """What the client has last heard of the server's health, by service."""

    def peer(self, side: Process) -> Process:
        return self.server if side is self.client else self.client


class Network:
    """All wires, listeners and connections."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self._loop = loop
        self.random = random
        self.listeners: dict[str, Any] = {}
        """Endpoint -> the server that listens there."""
        self.connections: list[Connection] = []
        self._silent: dict[tuple[str, str], list[tuple[Stream, Process, Callable[[], None]]]] = {}
        """(from, to) of silent wires -> what was sent since."""
        self.slow_s = 0.0
        """The most that a message takes beyond its usual latency."""
        self.num_messages = 0

    def latency_s(self) -> float:
        slow_s = self.random.random() ** 4 * self.slow_s if self.slow_s else 0.0
        return LATENCY_S[0] + (LATENCY_S[1] - LATENCY_S[0]) * self.random.random() + slow_s

    def is_silent(self, one: Process, other: Process) -> bool:
        """Whether either direction carries nothing."""
        return (one.name, other.name) in self._silent or (other.name, one.name) in self._silent

    def transmit(self, stream: Stream, sender: Process, receiver: Process, deliver: Callable[[], None]) -> None:
        """Call `deliver` in the receiver's context when it arrives; never if the receiver dies before."""
        self.num_messages += 1
        waiting = self._silent.get((sender.name, receiver.name))
        if waiting is not None:
            waiting.append((stream, receiver, deliver))
            return
        stream.arrives_s = max(stream.arrives_s, self._loop.time() + self.latency_s())
        self._loop.call_at(stream.arrives_s, deliver, context=receiver.context)

    # -- connections --------------------------------------------------------------------------------------------------

    def connect(self, client: Process, server: Process) -> Connection:
        connection = Connection(client, server, open_at={client: True, server: True})
        self.connections.append(connection)
        return connection

    def break_connection(self, connection: Connection, side: Process) -> None:
        """One side gives the connection up, in its own time, and the other one is told, when the wire carries."""

        def give_up() -> None:
            if connection.open_at[side]:
                connection.open_at[side] = False
                for call in list(connection.calls):
                    call.broken(side)
                peer = connection.peer(side)
                if connection.open_at[peer]:
                    self.transmit(Stream(), side, peer, lambda: self.break_connection(connection, peer))
            if connection in self.connections and not any(connection.open_at.values()):
                self.connections.remove(connection)

        self._loop.call_soon(give_up, context=side.context)

    def _break_later(self, connection: Connection, side: Process, still: Callable[[], bool]) -> None:
        def look() -> None:
            if still():
                self.break_connection(connection, side)

        self._loop.call_later(self.random.uniform(*KEEPALIVE_S), look, context=side.context)

    # -- faults -------------------------------------------------------------------------------------------------------

    def silence(self, sender: str, receiver: str) -> None:
        """Nothing passes in this direction any more, and nobody is told."""
        self._silent.setdefault((sender, receiver), [])
        for connection in self.connections:
            client, server = connection.client, connection.server
            if {client.name, server.name} == {sender, receiver}:
                for side in (client, server):
                    self._break_later(connection, side, lambda one=client, other=server: self.is_silent(one, other))

    def carry(self, sender: str, receiver: str) -> None:
        """The wire carries again, first what was sent meanwhile."""
        for stream, process, deliver in self._silent.pop((sender, receiver), []):
            stream.arrives_s = max(stream.arrives_s, self._loop.time() + self.latency_s())
            self._loop.call_at(stream.arrives_s, deliver, context=process.context)

    def cut(self, one: str, other: str) -> None:
        """Reset all connections between two processes."""
        for connection in list(self.connections):
            if {connection.client.name, connection.server.name} == {one, other}:
                for side in (connection.client, connection.server):
                    self.break_connection(connection, side)

    def hung(self, process: Process) -> None:
        """Its peers notice after some seconds that a process does not answer; call it when it is paused."""
        for connection in self.connections:
            if process in connection.open_at:
                self._break_later(connection, connection.peer(process), lambda: process.is_paused)

    def died(self, process: Process) -> None:
        """Its peers notice at once that a process has ended, or after some seconds where the wire is silent."""
        self.listeners = {endpoint: server for endpoint, server in self.listeners.items() if server.process is not process}
        for connection in list(self.connections):
            if process not in connection.open_at:
                continue
            peer = connection.peer(process)
            connection.open_at[process] = False
            if self.is_silent(process, peer):
                self._break_later(connection, peer, lambda: True)
            else:
                self.transmit(Stream(), process, peer, lambda c=connection, p=peer: self.break_connection(c, p))
