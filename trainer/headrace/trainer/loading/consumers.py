"""Tracks which thread commits which of a process's loaders.

A commit waits for the job's other ranks, so a thread that commits for several of them must not wait for its own later commits:

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
    """One rank's loader: who takes its steps, who commits them, and how far it is."""

    job: tuple[str, str]
    """(endpoint, job name): reorder services at other endpoints may have a job of the same name."""
    rank: int
    taking_thread: threading.Thread
    """The thread that took the loader's last step or, before its first step, made the loader."""
    committing_thread: threading.Thread | None = None
    """The thread that made the loader's last commit; None before the first one."""
    committed: int = 0
    """One more than the last step that the loader has committed; 0 before the first commit."""

    def will_be_committed_by(self, thread: threading.Thread, *, handed_over: bool) -> bool:
        """Return whether `thread` is expected to make the loader's next commit.

        That is the thread of its last commit. Before the first commit it is the thread that takes the loader's steps or, if
        `handed_over`, any thread, as other ranks of the job are committed by threads that do not take their steps.
        """
        if self.committing_thread is not None:
            return self.committing_thread is thread
        return handed_over or self.taking_thread is thread


class Consumers:
    """The loaders of this process with the threads that consume them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: weakref.WeakKeyDictionary[object, _Rank] = weakref.WeakKeyDictionary()

    def enter(self, loader: object, endpoint: str, job: str, rank: int) -> None:
        """Add a loader that has not committed yet. The calling thread counts as its consumer."""
        with self._lock:
            self._ranks[loader] = _Rank(job=(endpoint, job), rank=rank, taking_thread=threading.current_thread())

    def take(self, loader: object) -> None:
        """Note that the calling thread takes the loader's next step."""
        with self._lock:
            if loader in self._ranks:
                self._ranks[loader].taking_thread = threading.current_thread()

    def leave(self, loader: object) -> None:
        """Remove a loader that commits no more steps."""
        with self._lock:
            self._ranks.pop(loader, None)

    def commit(self, loader: object, step: int) -> bool:
        """Note that the calling thread commits the loader's step, and return whether it may wait for the commits of all ranks.

        It may not if it still has to commit that step for another rank itself.
        """
        thread = threading.current_thread()
        with self._lock:
            mine = self._ranks.get(loader)
            if mine is None:
                return True
            mine.committing_thread, mine.committed = thread, max(mine.committed, step + 1)
            return not any(
                other.job == mine.job
                and other.rank != mine.rank  # a former loader of the same rank commits nothing more, even if never closed
                and other.committed <= step
                and other.will_be_committed_by(thread, handed_over=mine.taking_thread is not thread)
                for other in self._ranks.values()
            )
