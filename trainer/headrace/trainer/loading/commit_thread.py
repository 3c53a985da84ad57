"""Commits of steps beside the training of later ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class CommitThread:
    """Makes commits in a thread of its own, one after the other, while the caller trains on.

    Until `settle` has returned, a step may not be in the ledger, and no checkpoint of it may be saved.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._last: Future[None] | None = None

    def begin(self, commit: Callable[[], None]) -> None:
        """Have `commit` called behind the commits that were begun before."""
        self._last = self._pool.submit(commit)

    def settle(self) -> None:
        """Wait until all commits are made. Raises what the last one raised."""
        if self._last is not None:
            self._last.result()

    def close(self, grace_s: float | None = None) -> None:
        """Make no further commits, after waiting for those begun: up to `grace_s`, or as long as it takes."""
        if self._last is not None:
            wait([self._last], timeout=grace_s)
        self._pool.shutdown(wait=grace_s is None)
