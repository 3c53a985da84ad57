"""A wait for a gloo message that can be abandoned.

If a connection ends in the middle of a message, gloo does not tell whoever waits for that message (`Pair::signalException` of
its TCP transport only signals operations that have not begun), and nothing in torch.distributed ends such a wait. Destroying a
group waits for its operations, too.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch.distributed as dist

_CHECK_S = 0.02  # how often a wait that may have to be abandoned checks whether it must be

_Outcome = dist.Work | BaseException | None
"""The result of a wait: the work that is done, the error with which it failed, or None, the signal of `start_polling`."""


class Waiter:
    """Waits for messages in a thread of its own, which can be abandoned; it then lives, with its work, until gloo's timeout.

    It uses queues written in C, and does not poll before `start_polling`: a step has many waits, each after a computation that
    leaves no Python in the caches.
    """

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        """groups: the groups whose messages are waited for.

        The thread keeps them alive as long as it lives, so that no other thread waits for their destruction.
        """
        self._works: queue.SimpleQueue[dist.Work | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._polls = False
        threading.Thread(target=_wait_for_each, args=(self._works, self._outcomes, groups), name="wait", daemon=True).start()

    def wait(self, work: dist.Work, should_abandon: Callable[[], bool]) -> bool:
        """Wait for a message; return False if `should_abandon` returned True before it came. Raises `work`'s error if it failed.

        After False the waiter cannot be used any more. `should_abandon` is not called before the first `start_polling`.
        """
        self._works.put(work)
        while True:
            try:
                outcome = self._outcomes.get(timeout=_CHECK_S if self._polls else None)
            except queue.Empty:
                if not should_abandon():
                    continue
                self.close()
                return False
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome is not None:
                return True

    def start_polling(self) -> None:
        """Make present and future waits poll `should_abandon`. May be called from any thread."""
        self._polls = True
        self._outcomes.put(None)

    def close(self, last: Sequence[dist.Work] = ()) -> None:
        """End the thread once its present work and `last` are done, without waiting for it."""
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
        del work  # frees its tensors
