"""A node's client for its job's membership: it sends heartbeats, and receives snapshots of the nodes and their pipelines."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from headrace import rpc
from headrace.errors import HeadraceError, UnavailableError, UnrecoverableError
from headrace.observability.logs import pairs
from headrace.v1 import membership_pb2, membership_pb2_grpc
from headrace.v1.membership_pb2 import Formation, NodeHello, NodeMessage, Snapshot

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.3  # three in the second after which a silent node is lost; not more, as each wakes threads beside the training
CHECK_S = 0.2  # how often a node checks whether the service is silent
SILENCE_S = 1.5  # a service that is silent for so long, three of its pulses, hangs: another one may lead
AWAY_TIMEOUT_S = 600.0  # how long a node looks for a service before it gives up
RETRY_S = 0.1
CLOSE_TIMEOUT_S = 2.0


class MembershipClient:
    """One node's membership in its job. It rejoins by itself when the reorder service is lost. Thread-safe.

    `newest` and `urgent` are plain attributes, for hot loops; `wait` is for a thread that has nothing else to do.
    """

    def __init__(self, endpoint: str, hello: NodeHello) -> None:
        """`endpoint`: HOST:PORT of the reorder service, or several, separated by commas. `hello`: first message of the stream."""
        self.newest: Snapshot | None = None
        """The newest snapshot, whether or not this node is in it."""
        self.urgent = 0
        """Newest generation that takes effect at once, not at the end of a step; 0 if there was none. `newest` may be later."""
        self._endpoint = endpoint
        self._hello = NodeHello()
        self._hello.CopyFrom(hello)
        self._to_say: queue.SimpleQueue[NodeMessage | None] = queue.SimpleQueue()
        self._recovered: NodeMessage | None = None
        self._changed = threading.Condition()  # notified of a snapshot and of the membership's end
        self._ended: HeadraceError | None = None
        self._call: Any = None
        self._heard_s = 0.0  # when the service last said something, or the last attempt to join began
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=target, name="membership", daemon=True) for target in (self._follow, self._watch)
        ]

    def open(self) -> None:
        """Join in the background. Raises EndpointError if the endpoint is malformed or nothing answers there."""
        rpc.await_reorder_service(self._endpoint)
        for thread in self._threads:
            thread.start()

    def wait(self, newer_than: int, timeout_s: float | None = None) -> Snapshot:
        """Wait until there is a snapshot of a generation above `newer_than`, and return the newest one.

        Raises the error that ended the membership if no such snapshot will come, and TimeoutError.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_newer(newer_than) or self._ended is not None, timeout_s):
                raise TimeoutError(f"no snapshot after generation {newer_than} within {timeout_s} s")
            if self.newest is not None and self._is_newer(newer_than):
                return self.newest
            assert self._ended is not None
            raise self._ended

    def leave(self) -> None:
        """Announce that this node will end. It must take part until the others follow a snapshot without it, then `close`."""
        self._hello.leaving = True
        self._to_say.put(NodeMessage(leave=membership_pb2.Leave()))

    def recovered(self, formation: Formation, step: int, phases: Mapping[str, float]) -> None:
        """Report, as the first node of a snapshot, that training goes on with `step`.

        `formation`: the snapshot's pipelines, and the first step to plan for them. `phases`: seconds of each phase of the
        recovery, in order.
        """
        items = [membership_pb2.Phase(name=name, seconds=seconds) for name, seconds in phases.items()]
        message = membership_pb2.Recovered(generation=formation.generation, step=step, phases=items, formation=formation)
        self._recovered = NodeMessage(recovered=message)
        self._to_say.put(self._recovered)

    def cut_off(self, generation: int) -> None:
        """Report that connections to other nodes ended, though no snapshot newer than `generation` has come."""
        self._to_say.put(NodeMessage(cut_off=membership_pb2.CutOff(generation=generation)))

    def close(self, *, done: bool = False) -> None:
        """End the membership. The job counts it as the loss of a node unless `done`: the node has nothing left to do."""
        self._closed.set()
        if done:
            self._to_say.put(NodeMessage(leave=membership_pb2.Leave(done=True)))
        self._to_say.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(CLOSE_TIMEOUT_S)
        self._cancel()
        self._end(UnavailableError("the membership is closed"))

    def _is_newer(self, than: int) -> bool:
        return self.newest is not None and self.newest.generation > than

    def _end(self, error: HeadraceError) -> None:
        with self._changed:
            self._ended = self._ended or error
            self._changed.notify_all()

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _follow(self) -> None:
        """Join, and rejoin after every lost stream, until something ends the membership."""
        answered_s, told_s = time.monotonic(), 0.0
        while not self._closed.is_set():
            try:
                with rpc.translated(self._endpoint), rpc.channel(self._endpoint) as channel:
                    self._heard_s = time.monotonic()
                    self._to_say = queue.SimpleQueue()  # the former stream may still read the old queue
                    self._call = membership_pb2_grpc.MembershipStub(channel).Join(self._messages(self._to_say))
                    for snapshot in self._call:
                        answered_s = self._heard_s = time.monotonic()
                        self._take(snapshot)
                if self.newest is not None and self.newest.error:
                    self._end(UnrecoverableError(self.newest.error))
                    return
            except UnavailableError as err:
                if time.monotonic() - answered_s > AWAY_TIMEOUT_S:
                    self._end(err)
                    return
                if told_s != answered_s:  # log it once per outage
                    log.info("joining again %s", pairs(job=self._hello.job, node=self._hello.node, error=err))
                    told_s = answered_s
            except HeadraceError as err:
                self._end(err)
                return
            self._closed.wait(RETRY_S)

    def _messages(self, to_say: queue.SimpleQueue[NodeMessage | None]) -> Iterator[NodeMessage]:
        """Yield the messages to the service, with heartbeats. It runs in gRPC's own thread, however busy other threads are."""
        yield NodeMessage(hello=self._hello)
        if self._recovered is not None:
            yield self._recovered
        while not self._closed.is_set() or not to_say.empty():
            try:
                message = to_say.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                message = NodeMessage(heartbeat=membership_pb2.NodeHeartbeat())
            if message is None:
                return
            yield message

    def _take(self, snapshot: Snapshot) -> None:
        if self._is_newer(snapshot.generation - 1) or not snapshot.generation:
            return
        with self._changed:
            self._hello.generation = snapshot.generation
            self.newest, self.urgent = snapshot, snapshot.urgent
            self._changed.notify_all()

    def _watch(self) -> None:
        """Cancel the stream to a service that has been silent for `SILENCE_S`, so that the node rejoins.

        Checks are counted, not seconds: where this process is held up, it hears nobody, and that is not the service's fault.
        """
        checks, heard_s = 0, self._heard_s
        while not self._closed.wait(CHECK_S):
            last_s = self._heard_s
            checks, heard_s = (checks + 1 if last_s == heard_s else 0), last_s
            if checks * CHECK_S > SILENCE_S:
                self._cancel()
                checks = 0
