"""An EMULATION, on gloo, of how NCCL carries messages between two processes of a group: tags are ignored, and each process runs
the sends and receives of a pair strictly in the order in which it posted them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import cast

import torch
import torch.distributed as dist

from headrace.trainer.pipeline.channels import ChannelEnd

_TAG = 0


class OrderedBackend:
    """Takes the place of a group's backend for `send` and `recv`.

    An operation begins when the ones posted before it between the same two processes are done: a send once the other process
    takes it by a receive (as NCCL's do where a message is larger than its buffers), a receive once the message is there. To
    post one never waits, as NCCL's calls only enqueue a kernel.
    """

    def __init__(self, backend: dist.ProcessGroup) -> None:
        self._backend = backend
        self._queues: dict[int, SimpleQueue[_Operation]] = {}  # by the other process

    def rank(self) -> int:
        return self._backend.rank()

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        return self._post(to, lambda: self._backend.send(tensors, to, _TAG))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        return self._post(source, lambda: self._backend.recv(tensors, source, _TAG))

    def _post(self, peer: int, begin: Callable[[], dist.Work]) -> dist.Work:
        if peer not in self._queues:
            self._queues[peer] = SimpleQueue()
            threading.Thread(target=_run, args=(self._queues[peer],), name="ordered", daemon=True).start()
        operation = _Operation(begin)
        self._queues[peer].put(operation)
        return operation


class _Operation(dist.Work):
    def __init__(self, begin: Callable[[], dist.Work]) -> None:
        super().__init__()
        self._begin = begin
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._begin().wait()
        except BaseException as err:
            self._error = err
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return True


def _run(queue: SimpleQueue[_Operation]) -> None:
    while True:
        queue.get().run()


def ordered(end: ChannelEnd) -> ChannelEnd:
    """The end, of a group that EMULATES one of NCCL."""
    return end._replace(backend=cast(dist.ProcessGroup, OrderedBackend(end.backend)))
