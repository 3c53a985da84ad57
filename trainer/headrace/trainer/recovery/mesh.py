"""The connections among the nodes of one generation: gloo groups of torch.distributed whose waits can be cut short.

A wait for a gloo message ends when the peer's process ends, but not while the peer waits itself or hangs, and nothing in
torch.distributed ends such a wait. So a cut shuts down the connections themselves, and every wait on them fails at once, on both
sides. In the middle of a message not even that ends a wait. Collectives are therefore waited for a moment at a time and given up
after a cut, and a wait for a point-to-point message is abandoned in its thread (`cancellable_wait`). That costs next to nothing
while no node is lost. After a cut, all nodes make a new mesh.

State of layers goes over streams beside these groups (`state_streams`), which a cut ends in the middle, too.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from headrace.errors import UnavailableError
from headrace.trainer.recovery.cancellable_wait import Waiter
from headrace.trainer.recovery.state_streams import Door, Streams, address_behind, open_streams
from headrace.trainer.recovery.tcp_sockets import address_of, listening_ports, peer_of, tcp_sockets

log = logging.getLogger(__name__)

_CHECK_S = 0.02  # how often a node checks for a cut while it waits for gloo to connect
_RETRY_S = 0.01
_LEAVE_S = 0.1  # how long after a cut a wait that has not ended is given up
_TRY_TIMEOUT = timedelta(seconds=1)
_MOMENT = timedelta(milliseconds=50)
_IN_A_MESSAGE = "a connection to another node ended in the middle of a message"
MEET_TIMEOUT = timedelta(seconds=20)  # for connecting: a node that does not come is lost, and the mesh is cut before this ends
STEP_TIMEOUT = timedelta(seconds=1800)  # for waits on nodes that compute; some finish their part of a step before they connect


class MeshCutError(UnavailableError):
    """Communication with other nodes was cut short: a node was lost, or there is a newer snapshot of the nodes."""


class Meeting:
    """The store at which the nodes of a snapshot meet if this node is its first one. It exists as long as the node."""

    def __init__(self, host: str) -> None:
        """`host`: host at which other nodes reach this one."""
        self._store = TCPStore(host, 0, None, True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"


class Mesh:
    """The connections among all nodes of a generation. Each node makes one, and the same groups in the same order."""

    everybody: dist.ProcessGroup

    def __init__(
        self, address: str, name: str, rank: int, num_ranks: int, host: str, meet_timeout: timedelta = MEET_TIMEOUT
    ) -> None:
        """`address`: HOST:PORT of the first node's `Meeting`. `name`: unique name of the generation. `host`: host at which the
        other nodes reach this one. `meet_timeout`: longest wait for the other nodes to come.
        """
        self.rank, self.num_ranks = rank, num_ranks
        meeting_host, meeting_port = address_of(address)
        self._meeting = socket.gethostbyname(meeting_host), meeting_port
        self._name, self._host, self._meet_timeout = name, host, meet_timeout
        self._lock = threading.Lock()  # guards the times of cuts and the addresses below
        self._cut_s = self._pipelines_cut_s = math.inf  # time of the cut, if any
        self._devices: set[tuple[str, int]] = set()  # addresses on which nodes listen
        self._pipeline_devices: set[tuple[str, int]] = set()  # addresses for connections within pipelines
        self._door: Door | None = None
        self._doors: Sequence[str] = ()  # what the nodes' doors told, by rank
        self._groups: list[dist.ProcessGroup] = []
        self._waiter: Waiter | None = None
        self._unfinished: list[dist.Work] = []  # work that this node does not wait for, or has given up

    def connect(self) -> None:
        """Meet the other nodes and create the group `everybody`. Raises MeshCutError, also if they do not come in time."""
        with self.interruptible():
            self._store = PrefixStore(self._name, self._meet())
            (self._device, port), (self._pipeline_device, pipeline_port) = self._listen(), self._listen()
            host = socket.gethostbyname(self._host)
            self._door = Door(host)
            self._store.set(f"devices/{self.rank}", f"{host}:{port} {host}:{pipeline_port} {self._door.told}")
            found = [self._store.get(f"devices/{other}").decode().split() for other in range(self.num_ranks)]
            self._doors = [told for _, _, told in found]
            with self._lock:
                self._devices = {address_of(one) for one, _, _ in found} | {address_behind(told) for told in self._doors}
                self._pipeline_devices = {address_of(other) for _, other, _ in found}
            self.check()
            self.everybody = self.group("everybody", range(self.num_ranks))

    def _listen(self) -> tuple[Any, int]:
        """Create a gloo device, and return it with the port on which it listens."""
        before = listening_ports()
        device = ProcessGroupGloo.create_device(hostname=self._host)
        (port,) = {port for fd, port in listening_ports().items() if fd not in before}
        return device, port

    def _meet(self) -> TCPStore:
        """Connect to the meeting's store, once it is there, and return it. Raises MeshCutError after the timeout.

        Each attempt by torch is limited to a second, as it cannot be interrupted.
        """
        deadline = time.monotonic() + self._meet_timeout.total_seconds()
        while True:
            self.check()
            try:
                socket.create_connection(self._meeting, timeout=1.0).close()
                store = TCPStore(*self._meeting, None, False, timeout=_TRY_TIMEOUT)
            except (OSError, dist.DistError) as err:
                if time.monotonic() > deadline:
                    raise MeshCutError(f"the first node of the snapshot does not answer at {self._meeting}: {err}") from err
                time.sleep(_RETRY_S)
            else:
                self.check()  # after a cut, torch reconnects by itself
                store.set_timeout(self._meet_timeout)
                return store

    def group(self, name: str, ranks: Sequence[int], *, is_pipeline: bool = False) -> dist.ProcessGroup:
        """Create a group of some nodes, all of which, this one included, create it at the same time. Raises MeshCutError.

        is_pipeline: whether the group is within one pipeline, so that its connections outlast `cut(but_pipelines=True)`.
        """
        device = self._pipeline_device if is_pipeline else self._device
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [device], STEP_TIMEOUT  # for all waits in the group: it can't change later
        made: Future[dist.ProcessGroup] = Future()

        def connect() -> None:
            try:
                group = ProcessGroupGloo(PrefixStore(name, self._store), ranks.index(self.rank), len(ranks), options)
                made.set_result(cast(dist.ProcessGroup, group))  # it has the same methods
            except BaseException as err:
                made.set_exception(err)

        with self.interruptible():
            # If a node is lost at this moment, gloo waits for it without a connection that could be cut: the thread is abandoned.
            threading.Thread(target=connect, name="connect", daemon=True).start()
            while not wait([made], _CHECK_S).done:
                self.check()
            group = made.result()
        self._groups.append(group)
        return group

    def gather(self, said: bytes, lengths: Sequence[int]) -> list[bytes]:
        """Gather the bytes that every node says, by rank; nothing is sent if all are empty. Raises MeshCutError.

        lengths: number of bytes of every node, which all nodes know.
        """
        if not any(lengths):
            return [b""] * len(lengths)
        own = torch.frombuffer(bytearray(said.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        everybody = [torch.empty_like(own) for _ in lengths]
        with self.interruptible():
            self.wait(self.everybody.allgather([everybody], [own]))
        return [bytes(one[:length].numpy()) for one, length in zip(everybody, lengths, strict=True)]

    def streams(self, targets: Collection[int], sources: Collection[int]) -> AbstractContextManager[Streams]:
        """Return a context with a stream to each target and one of each source, in an `interruptible` block.

        The nodes at their other ends open them at the same time. A cut ends them, whatever is on its way.
        """
        assert self._door is not None, "the mesh is connected"
        timeout_s = STEP_TIMEOUT.total_seconds()
        return open_streams(
            self._door, self._doors, self.rank, targets=targets, sources=sources, timeout_s=timeout_s, check=self.check
        )

    def wait(self, work: dist.Work, *, in_pipeline: bool = False) -> None:
        """Wait for a collective, in an `interruptible` block; given up with MeshCutError shortly after a cut.

        in_pipeline: whether the group is within a pipeline, so that only a cut of pipelines counts.
        """
        try:
            while not _is_done(work):
                if self._is_cut(_LEAVE_S, in_pipeline=in_pipeline):
                    raise MeshCutError(_IN_A_MESSAGE)
        except BaseException:
            if not work.is_completed():  # destroying its group would wait for it
                self._unfinished.append(work)
            raise

    def wait_for_message(self, work: dist.Work, *, in_pipeline: bool = False) -> None:
        """Wait for a point-to-point message, in an `interruptible` block; given up with MeshCutError shortly after a cut.

        in_pipeline: whether the message is within a pipeline, so that only a cut of pipelines counts. Only one thread may wait
        at a time.
        """
        if self._waiter is None:
            self._waiter = Waiter(self._groups)
            if math.isfinite(self._cut_s):
                self._waiter.start_polling()
        if not self._waiter.wait(work, lambda: self._is_cut(_LEAVE_S, in_pipeline=in_pipeline)):
            self._waiter = None
            raise MeshCutError(_IN_A_MESSAGE)

    def arrive(self) -> dist.Work:
        """Start a barrier without waiting for it: the returned work is done once all nodes have called this.

        If a connection ends before that, this node cuts the mesh, except within pipelines, at its next `check`: other nodes may
        be waiting for one whose barrier failed, and no other node notices. Raises MeshCutError.
        """
        try:
            with self.interruptible():
                arrival = self.everybody.barrier()
        except MeshCutError:
            self.cut(but_pipelines=True)
            raise
        self._unfinished = [*(one for one in self._unfinished if not one.is_completed()), arrival]
        return arrival

    def all_arrive(self, arrival: dist.Work) -> bool:
        """Wait for the barrier that `arrive` started; return False if a node is lost before. May be called from any thread."""
        try:
            while not _is_done(arrival):
                if self._is_cut(_LEAVE_S, in_pipeline=False):
                    return False
        except RuntimeError:
            return False
        return True

    def barrier(self) -> None:
        """Wait until all nodes have called this. Raises MeshCutError."""
        with self.interruptible():
            self.wait(self.arrive())

    @contextmanager
    def interruptible(self, *, in_pipeline: bool = False) -> Iterator[None]:
        """Return a context that raises MeshCutError if the mesh is cut, or in place of the error for a lost connection.

        in_pipeline: whether only a cut of pipelines counts.
        """
        self.check(in_pipeline=in_pipeline)
        try:
            yield
        except (dist.DistError, ConnectionError, RuntimeError) as err:
            if isinstance(err, (dist.DistError, ConnectionError)) or "gloo" in str(err) or "onnection" in str(err):
                raise MeshCutError(f"a connection to another node ended: {_what(str(err))}") from err
            raise
        self.check(in_pipeline=in_pipeline)

    def cut(self, *, but_pipelines: bool = False) -> None:
        """Shut down the connections, which ends every wait for another node on both sides. May be called from any thread.

        but_pipelines: whether to keep connections within pipelines, whose nodes can then go on waiting for each other.
        """
        with self._lock:
            now_s = time.monotonic()
            if self._pipelines_cut_s <= now_s:
                return
            self._cut_s, self._pipelines_cut_s = min(self._cut_s, now_s), math.inf if but_pipelines else now_s
            waiter = self._waiter  # the waiting thread may set it to None at this moment
            if waiter is not None:
                waiter.start_polling()
            devices = self._devices if but_pipelines else self._devices | self._pipeline_devices
            if self._door is not None:
                self._door.shut()
            for _, connection in tcp_sockets(listening=False):
                with suppress(OSError):  # ended meanwhile
                    peer = peer_of(connection)
                    if peer == self._meeting or devices & {connection.getsockname()[:2], peer}:
                        connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut the mesh and leave all groups."""
        self.cut()
        unfinished = [work for work in self._unfinished if not work.is_completed()]
        if unfinished and self._waiter is None:
            self._waiter = Waiter(self._groups)
        if self._waiter is not None:
            self._waiter.close(unfinished)
        if self._door is not None:
            self._door.close()
        self._groups = []
        self.__dict__.pop("everybody", None)

    def check(self, *, in_pipeline: bool = False) -> None:
        """Raise MeshCutError if the mesh is cut; first cut it, except within pipelines, if a barrier or given-up work has failed.

        in_pipeline: whether to raise only if pipelines are cut too.
        """
        if not self._is_cut(0.0, in_pipeline=False) and any(map(_has_failed, self._unfinished)):
            self.cut(but_pipelines=True)
        if self._is_cut(0.0, in_pipeline=in_pipeline):
            raise MeshCutError("there is a newer snapshot of the nodes, or a connection to one of them ended")

    def _is_cut(self, since_s: float, *, in_pipeline: bool) -> bool:
        return time.monotonic() - (self._pipelines_cut_s if in_pipeline else self._cut_s) >= since_s


def _is_done(work: dist.Work) -> bool:
    """Whether a collective is done within a moment. Raises its error if it failed.

    The short timeout does a collective no harm, but would end all point-to-point messages of a group.
    """
    is_over = work.is_completed()
    try:
        work.wait(_MOMENT)
    except RuntimeError:
        if is_over:
            raise
        return False
    return True


def _has_failed(work: dist.Work) -> bool:
    if work.is_completed():
        try:
            work.wait()
        except RuntimeError:
            return True
    return False


def _what(words: str) -> str:
    """Return the readable part of gloo's error message, such as "Connection closed by peer [127.0.0.1]:9642"."""
    first = words.splitlines()[0].partition(". This is typically")[0]
    return first.rpartition("cc:")[2].partition("] ")[2] or first
