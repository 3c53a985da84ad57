"""The connections of a generation's nodes: groups of torch.distributed that can be cut.

A wait for a message of gloo ends when the peer's process does; one for a peer that lives, but waits itself or hangs, does not,
and nothing in torch.distributed ends it. So the connections themselves are shut down: whoever waits on them then fails at
once, here and on the other side. In the middle of a message even that ends no wait: then what all nodes do is given up, as they
wait for it a moment at a time, and a wait for one node's message is left behind (`recovery.waiting`). That costs next to
nothing while nobody is lost. All nodes then make a new mesh.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from headrace.errors import UnavailableError
from headrace.trainer.recovery.waiting import Waiter

log = logging.getLogger(__name__)

_CHECK_S = 0.02  # how often a node that waits for gloo to connect looks whether the mesh is cut
_RETRY_S = 0.01
_LEAVE_S = 0.1  # how long after a cut a wait is left behind that has not ended
_IN_IPV6 = "::ffff:"  # before an address of IPv4: a TCPStore's sockets are of IPv6
_TRY_TIMEOUT = timedelta(seconds=1)
_MOMENT = timedelta(milliseconds=50)
_IN_A_MESSAGE = "a connection to another node ended in the middle of a message"
MEET_TIMEOUT = timedelta(seconds=20)  # for connecting: whoever does not come is lost, and the mesh is cut before
STEP_TIMEOUT = timedelta(seconds=1800)  # of waits for nodes that compute, some of them the rest of a step before they connect


class MeshCutError(UnavailableError):
    """A node was lost, or the others know of a newer snapshot."""


class Meeting:
    """Where the nodes of a snapshot meet whose first one this node is. It is there as long as the node."""

    def __init__(self, host: str) -> None:
        """`host`: by which the other nodes reach this one."""
        self._store = TCPStore(host, 0, None, True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"


class Mesh:
    """All nodes of a generation. Each makes one, and the same groups in the same order."""

    everybody: dist.ProcessGroup

    def __init__(
        self, address: str, name: str, rank: int, num_ranks: int, host: str, meet_timeout: timedelta = MEET_TIMEOUT
    ) -> None:
        """The others are met at `address`. `name`: of the generation; `host`: of this node."""
        self.rank, self.num_ranks = rank, num_ranks
        meeting_host, meeting_port = _address(address)
        self._meeting = socket.gethostbyname(meeting_host), meeting_port
        self._name, self._host, self._meet_timeout = name, host, meet_timeout
        self._lock = threading.Lock()  # of what is cut
        self._cut_s = self._pipelines_cut_s = math.inf  # when that was
        self._devices: set[tuple[str, int]] = set()  # on which nodes listen
        self._pipeline_devices: set[tuple[str, int]] = set()  # others, for connections within pipelines
        self._groups: list[dist.ProcessGroup] = []
        self._waiter: Waiter | None = None
        self._unfinished: list[dist.Work] = []  # what this node does not wait for, or not any more

    def connect(self) -> None:
        """Meet the others. Raises MeshCutError."""
        with self.interruptible():
            self._store = PrefixStore(self._name, self._meet())
            (self._device, port), (self._pipeline_device, pipeline_port) = self._listen(), self._listen()
            host = socket.gethostbyname(self._host)
            self._store.set(f"devices/{self.rank}", f"{host}:{port} {host}:{pipeline_port}")
            found = [self._store.get(f"devices/{other}").decode().split() for other in range(self.num_ranks)]
            with self._lock:
                self._devices = {_address(one) for one, _ in found}
                self._pipeline_devices = {_address(other) for _, other in found}
            self.check()
            self.everybody = self.group("everybody", range(self.num_ranks))

    def _listen(self) -> tuple[Any, int]:
        """A device of gloo, and its port."""
        before = _listening()
        device = ProcessGroupGloo.create_device(hostname=self._host)
        (port,) = {port for fd, port in _listening().items() if fd not in before}
        return device, port

    def _meet(self) -> TCPStore:
        """The meeting's store, once it is there: torch's own attempts, which cannot be cut off, last no longer than a moment."""
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
                self.check()  # torch connects again by itself after a cut
                store.set_timeout(self._meet_timeout)
                return store

    def group(self, name: str, ranks: Sequence[int], *, is_pipeline: bool = False) -> dist.ProcessGroup:
        """Of some nodes, this one among them, which all make it at this moment. Raises MeshCutError."""
        device = self._pipeline_device if is_pipeline else self._device
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [device], STEP_TIMEOUT  # of all waits in the group, and none can be changed later
        made: Future[dist.ProcessGroup] = Future()

        def connect() -> None:
            try:
                group = ProcessGroupGloo(PrefixStore(name, self._store), ranks.index(self.rank), len(ranks), options)
                made.set_result(cast(dist.ProcessGroup, group))  # it has the same methods
            except BaseException as err:
                made.set_exception(err)

        with self.interruptible():
            # For a node that is lost just now gloo waits without any connection to cut: then the thread is left behind.
            threading.Thread(target=connect, name="connect", daemon=True).start()
            while not wait([made], _CHECK_S).done:
                self.check()
            group = made.result()
        self._groups.append(group)
        return group

    def gather(self, said: bytes, lengths: Sequence[int]) -> list[bytes]:
        """What every node says, whose lengths all know; nothing is sent where nobody says anything. Raises MeshCutError."""
        if not any(lengths):
            return [b""] * len(lengths)
        own = torch.frombuffer(bytearray(said.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        everybody = [torch.empty_like(own) for _ in lengths]
        with self.interruptible():
            self.wait(self.everybody.allgather([everybody], [own]))
        return [bytes(one[:length].numpy()) for one, length in zip(everybody, lengths, strict=True)]

    def wait(self, work: dist.Work, *, in_pipeline: bool = False) -> None:
        """For what all nodes of a group do, in an `interruptible` block. in_pipeline: within a pipeline."""
        try:
            while not _is_done(work):
                if self._is_cut(_LEAVE_S, in_pipeline=in_pipeline):
                    raise MeshCutError(_IN_A_MESSAGE)
        except BaseException:
            if not work.is_completed():  # the end of its group would wait for it
                self._unfinished.append(work)
            raise

    def wait_for_message(self, work: dist.Work, *, in_pipeline: bool = False) -> None:
        """As `wait`, for a message from one node to another. One thread at a time."""
        if self._waiter is None:
            self._waiter = Waiter(self._groups)
            if math.isfinite(self._cut_s):
                self._waiter.look()
        if not self._waiter.wait(work, lambda: self._is_cut(_LEAVE_S, in_pipeline=in_pipeline)):
            self._waiter = None
            raise MeshCutError(_IN_A_MESSAGE)

    def arrive(self) -> dist.Work:
        """Say that this node is here: what it returns is done when all nodes have said so. Raises MeshCutError.

        Where a connection ends before, the mesh is cut but for pipelines as soon as this node looks at it (`check`): the others
        may wait for the one that did not hear of all of them, and nobody else notices.
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
        """Wait until they have. False where a node is lost before. From any thread."""
        try:
            while not _is_done(arrival):
                if self._is_cut(_LEAVE_S, in_pipeline=False):
                    return False
        except RuntimeError:
            return False
        return True

    def barrier(self) -> None:
        """Once all nodes are here. Raises MeshCutError."""
        with self.interruptible():
            self.wait(self.arrive())

    @contextmanager
    def interruptible(self, *, in_pipeline: bool = False) -> Iterator[None]:
        """Raises MeshCutError in place of what torch.distributed says of a lost connection."""
        self.check(in_pipeline=in_pipeline)
        try:
            yield
        except (dist.DistError, RuntimeError) as err:
            if isinstance(err, dist.DistError) or "gloo" in str(err) or "onnection" in str(err):
                raise MeshCutError(f"a connection to another node ended: {_what(str(err))}") from err
            raise
        self.check(in_pipeline=in_pipeline)

    def cut(self, *, but_pipelines: bool = False) -> None:
        """End every wait for another node, here and there. From any thread.

        but_pipelines: nodes of one pipeline can go on waiting for each other.
        """
        with self._lock:
            now_s = time.monotonic()
            if self._pipelines_cut_s <= now_s:
                return
            self._cut_s, self._pipelines_cut_s = min(self._cut_s, now_s), math.inf if but_pipelines else now_s
            waiter = self._waiter  # which whoever waits may let go of just now
            if waiter is not None:
                waiter.look()
            devices = self._devices if but_pipelines else self._devices | self._pipeline_devices
            for _, connection in _tcp_sockets(listening=False):
                with suppress(OSError):  # ended meanwhile
                    peer = _peer(connection)
                    if peer == self._meeting or devices & {connection.getsockname()[:2], peer}:
                        connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave all groups."""
        self.cut()
        unfinished = [work for work in self._unfinished if not work.is_completed()]
        if unfinished and self._waiter is None:
            self._waiter = Waiter(self._groups)
        if self._waiter is not None:
            self._waiter.close(unfinished)
        self._groups = []
        self.__dict__.pop("everybody", None)

    def check(self, *, in_pipeline: bool = False) -> None:
        """Raise MeshCutError where the mesh is cut. in_pipeline: within pipelines, too."""
        if not self._is_cut(0.0, in_pipeline=False) and any(map(_has_failed, self._unfinished)):
            self.cut(but_pipelines=True)
        if self._is_cut(0.0, in_pipeline=in_pipeline):
            raise MeshCutError("there is a newer snapshot of the nodes, or a connection to one of them ended")

    def _is_cut(self, since_s: float, *, in_pipeline: bool) -> bool:
        return time.monotonic() - (self._pipelines_cut_s if in_pipeline else self._cut_s) >= since_s


def _is_done(work: dist.Work) -> bool:
    """Within a moment, which does a collective no harm, but would end a group's messages. Raises what `work` does."""
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
    """ "Connection closed by peer [127.0.0.1]:9642" of what gloo says."""
    first = words.splitlines()[0].partition(". This is typically")[0]
    return first.rpartition("cc:")[2].partition("] ")[2] or first


def _listening() -> dict[int, int]:
    """Ports on which this process listens, by file descriptor."""
    return {fd: int(found.getsockname()[1]) for fd, found in _tcp_sockets(listening=True)}


def _tcp_sockets(*, listening: bool) -> Iterator[tuple[int, socket.socket]]:
    """Those of this process: file descriptor, and a second one of it while the caller looks at it."""
    for fd in _descriptors():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
            is_tcp = found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listening:
                yield fd, found


def _descriptors() -> Iterator[int]:
    """Of sockets: a `socket.socket` that finds another file behind its descriptor raises, and leaves it open."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield int(name)
        except OSError:  # closed meanwhile
            continue


def _peer(connection: socket.socket) -> tuple[str, int]:
    host, port = connection.getpeername()[:2]
    return host.removeprefix(_IN_IPV6), port


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)
