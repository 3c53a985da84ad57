"""A wait for a message that whoever waits can leave.

Where a connection ends in the middle of a message, gloo tells nobody who waits for that very message (`Pair::signalException` of
its TCP transport speaks to operations that have not begun), and nothing in torch.distributed ends such a wait. The end of a group
waits for its operations, too.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch.distributed as dist

_CHECK_S = 0.02  # how often whoever waits looks whether to leave


class Waiter:
    """Waits in a thread of its own. That one may stay behind, with what it waits for, for as long as gloo's timeout."""

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        """groups: whose messages are waited for. They last as long as the thread, so that nobody else waits for their end."""
        self._works: queue.SimpleQueue[tuple[dist.Work, Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=_wait_for_each, args=(self._works, groups), name="wait", daemon=True).start()

    def wait(self, work: dist.Work, leaves: Callable[[], bool]) -> bool:
        """Whether it is done: else `leaves` has said so before, and the waiter is of no use any more. Raises what `work` does."""
        done: Future[None] = Future()
        self._works.put((work, done))
        while True:
            try:
                error = done.exception(_CHECK_S)
            except TimeoutError:
                if not leaves():
                    continue
                self.close()
                return False
            if error is not None:
                raise error
            return True

    def close(self, last: Sequence[dist.Work] = ()) -> None:
        """Nobody waits any more, but the thread itself for the last ones."""
        for work in last:
            self._works.put((work, Future()))
        self._works.put(None)


def _wait_for_each(works: queue.SimpleQueue[tuple[dist.Work, Future[None]] | None], _: list[dist.ProcessGroup]) -> None:
    while (item := works.get()) is not None:
        work, done = item
        try:
            work.wait()
        except BaseException as err:
            done.set_exception(err)
        else:
            done.set_result(None)
        del item, work, done  # and what they hold
