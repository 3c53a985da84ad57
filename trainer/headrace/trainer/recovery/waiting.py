"""A wait for a message that whoever waits can leave.

Where a connection ends in the middle of a message, gloo tells nobody who waits for that very message (`Pair::signalException` of
its TCP transport speaks to operations that have not begun), and nothing in torch.distributed ends such a wait. The end of a group
waits for its operations, too.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch.distributed as dist

_CHECK_S = 0.02  # how often whoever waits, once it may have to leave, asks whether to

_Outcome = dist.Work | BaseException | None
"""What is done, how it failed, or that it is time to look."""


class Waiter:
    """Waits in a thread of its own. That one may stay behind, with what it waits for, for as long as gloo's timeout.

    All goes by queues written in C, and nobody looks up before there is something to see: a step has many waits, each behind a
    computation that leaves no Python in the caches.
    """

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        """groups: whose messages are waited for. They last as long as the thread, so that nobody else waits for their end."""
        self._works: queue.SimpleQueue[dist.Work | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._looks = False
        threading.Thread(target=_wait_for_each, args=(self._works, self._outcomes, groups), name="wait", daemon=True).start()

    def wait(self, work: dist.Work, leaves: Callable[[], bool]) -> bool:
        """Whether it is done: else `leaves` has said so before, and the waiter is of no use any more. Raises what `work` does.

        Nobody asks `leaves` before the first `look`.
        """
        self._works.put(work)
        while True:
            try:
                outcome = self._outcomes.get(timeout=_CHECK_S if self._looks else None)
            except queue.Empty:
                if not leaves():
                    continue
                self.close()
                return False
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome is not None:
                return True

    def look(self) -> None:
        """From now on `leaves` may say so. From any thread."""
        self._looks = True
        self._outcomes.put(None)

    def close(self, last: Sequence[dist.Work] = ()) -> None:
        """Nobody waits any more, but the thread itself for the last ones."""
        for work in last:
            self._works.put(work)
        self._works.put(None)


def _wait_for_each(
    works: queue.SimpleQueue[dist.Work | None], outcomes: queue.SimpleQueue[_Outcome], _: list[dist.ProcessGroup]
) -> None:
    while (work := works.get()) is not None:
        try:
            work.wait()
        except BaseException as err:
            outcomes.put(err)
        else:
            outcomes.put(work)
        del work  # and what it holds
