"""Which of a process's loaders one thread commits: where it does so for several ranks of a job, it must not wait for itself.

for steps in zip(first_rank, second_rank):      # one thread, two loaders of a job
    ...
    first_rank.commit(steps[0])                 # must not wait for the line below
    second_rank.commit(steps[1])                # waits: then the step is in the ledger
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class _Rank:
    """What is known of a loader."""

    job: tuple[str, str]
    """With the endpoint of its service: others may have a job of the same name."""
    rank: int
    takes: threading.Thread
    """The thread that made the loader, or took a step of it last."""
    commits: threading.Thread | None = None
    """The thread of its last commit."""
    committed: int = 0
    """The step behind the last one that it has committed."""

    def will_be_committed_by(self, thread: threading.Thread, *, handed_over: bool) -> bool:
        """`handed_over`: ranks of its job are committed by other threads than take their steps, and this may be one of them."""
        if self.commits is not None:
            return self.commits is thread
        return handed_over or self.takes is thread


class Consumers:
    """Of all loaders of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: weakref.WeakKeyDictionary[object, _Rank] = weakref.WeakKeyDictionary()

    def enter(self, loader: object, endpoint: str, job: str, rank: int) -> None:
        """The loader has committed nothing yet; the calling thread has made it."""
        with self._lock:
            self._ranks[loader] = _Rank(job=(endpoint, job), rank=rank, takes=threading.current_thread())

    def take(self, loader: object) -> None:
        """The calling thread takes the loader's next step."""
        with self._lock:
            if loader in self._ranks:
                self._ranks[loader].takes = threading.current_thread()

    def leave(self, loader: object) -> None:
        """The loader commits no more steps."""
        with self._lock:
            self._ranks.pop(loader, None)

    def commit(self, loader: object, step: int) -> bool:
        """The calling thread commits the loader's step. Whether it may wait until all ranks have.

        It may not where it has still to commit the step of another rank itself.
        """
        thread = threading.current_thread()
        with self._lock:
            mine = self._ranks.get(loader)
            if mine is None:
                return True
            mine.commits, mine.committed = thread, max(mine.committed, step + 1)
            return not any(
                other.job == mine.job
                and other.rank != mine.rank  # a former loader of the same rank is over, though nobody has closed it
                and other.committed <= step
                and other.will_be_committed_by(thread, handed_over=mine.takes is not thread)
                for other in self._ranks.values()
            )
