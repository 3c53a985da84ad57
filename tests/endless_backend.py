"""An EMULATION, on gloo, of how NCCL's communicators wait: nothing but an abort ends a wait, not even the end of another
process, and while the main thread waits no signal handler of Python's runs.

`use_endless` makes it the backend of CPUs in this process.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import ProcessGroupGloo

NAME = "endless"
ABORTED = "an EMULATED communicator is aborted"
"""What the process logs of each that is."""
STUCK = "an EMULATED communicator does not come to the end of its abort"
_END, _FOREVER = "end", timedelta(days=1)

log = logging.getLogger(__name__)


class EndlessGroup(dist.ProcessGroup):
    """A group of which an operation ends when all of its processes have taken part, or when this process aborts the group."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, *, aborts: bool) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs lack torch's constructor for extensions
        self._gloo: Any = ProcessGroupGloo(store, rank, size, timeout)
        self._aborts = aborts
        self._lock = threading.Lock()
        self._pending: set[_EndlessWork] = set()
        self._aborted = False

    def getBackendName(self) -> str:  # noqa: N802  # torch's name for it
        return NAME

    def abort(self) -> None:
        log.warning(ABORTED if self._aborts else STUCK)
        if not self._aborts:
            threading.Event().wait()
        with self._lock:
            self._aborted = True
            for work in self._pending:
                work.end(dist.DistBackendError("the communicator was aborted"))

    def allreduce(self, tensors: Any, options: Any = None) -> dist.Work:  # type: ignore[override]
        return self._begin(self._gloo.allreduce(tensors, options or dist.AllreduceOptions()))

    def all_gather_single(self, output: Any, tensor: Any, options: Any) -> dist.Work:  # type: ignore[override]
        return self._begin(self._gloo._allgather_base(output, tensor, options))

    def reduce_scatter_single(self, output: Any, tensor: Any, options: Any) -> dist.Work:
        return self._begin(self._gloo._reduce_scatter_base(output, tensor, options))

    def all_to_all_single(self, output: Any, tensor: Any, received: Any, sent: Any, options: Any) -> dist.Work:  # type: ignore[override]
        return self._begin(self._gloo.alltoall_base(output, tensor, received, sent, options))

    def _begin(self, of_gloo: dist.Work) -> dist.Work:
        work = _EndlessWork(of_gloo)
        with self._lock:
            self._pending.add(work)
            if self._aborted:
                work.end(dist.DistBackendError("the communicator was aborted before"))
        return work


class _EndlessWork(dist.Work):
    def __init__(self, of_gloo: dist.Work) -> None:
        super().__init__()
        self._of_gloo = of_gloo
        self._ended = HashStore()  # one waits for its keys in C++, as in NCCL
        self._error: Exception | None = None
        threading.Thread(target=self._follow, name="endless", daemon=True).start()

    def _follow(self) -> None:
        try:
            self._of_gloo.wait()
        except RuntimeError:
            return  # gloo notices that another process has ended, and NCCL does not
        self.end()

    def end(self, error: Exception | None = None) -> None:
        self._error = self._error or error
        self._ended.set(_END, "")

    def is_completed(self) -> bool:
        return self._ended.check([_END])

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._ended.wait([_END], _FOREVER)
        if self._error is not None:
            raise self._error
        return True


def use_endless(*, aborts: bool = True) -> None:
    """`aborts`: whether an abort comes to its end, which NCCL's may not."""

    def make(store: Store, rank: int, size: int, timeout: timedelta) -> EndlessGroup:
        return EndlessGroup(store, rank, size, timeout, aborts=aborts)

    dist.Backend.register_backend(NAME, make, devices=["cpu"])
    dist.Backend.default_device_backend_map["cpu"] = NAME
