"""Work on many items that waits for servers, done side by side in threads that all jobs share, and by whoever needs a result.

A thread that is stuck with a slow server holds up nobody else: an item whose turn has not come when its result is needed is done
by the thread that needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

MOST_AHEAD = 8
"""Items of one caller that are begun before the result of the first is taken: their results are in memory meanwhile."""

_threads = ThreadPoolExecutor(32, thread_name_prefix="ahead")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Begun(Generic[_Result]):
    """A piece of work that is begun as soon as there is a thread for it."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work = work
        self._future: Future[_Result] = _threads.submit(work)

    def result(self) -> _Result:
        """Return or raise what the work does, which is done now if it has not been begun."""
        return self._work() if self._future.cancel() else self._future.result()


def in_order(items: Iterable[_Item], work: Callable[[_Item], _Result]) -> Iterator[tuple[_Item, _Result]]:
    """Yield each item with the result of `work`, in order, with at most MOST_AHEAD begun. Raises what `work` raises."""
    ahead: deque[tuple[_Item, Begun[_Result]]] = deque()
    for item in items:
        ahead.append((item, Begun(partial(work, item))))
        if len(ahead) == MOST_AHEAD:
            first, begun = ahead.popleft()
            yield first, begun.result()
    for item, begun in ahead:
        yield item, begun.result()
