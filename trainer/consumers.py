"""Which thread takes the steps of which loader: one that takes those of several ranks must not wait for itself.

for steps in zip(first_rank, second_rank):      # one thread, two loaders of a job
    ...
    first_rank.commit(steps[0])                 # must not wait for the line below
    second_rank.commit(steps[1])
"""

from __future__ import annotations

import threading
import weakref


class Consumers:
    """Of all open loaders of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: weakref.WeakKeyDictionary[object, tuple[str, int]] = weakref.WeakKeyDictionary()

    def take(self, loader: object, job: str) -> None:
        """The calling thread takes the loader's steps from now on."""
        with self._lock:
            self._of[loader] = (job, threading.get_ident())

    def leave(self, loader: object) -> None:
        """The loader is closed."""
        with self._lock:
            self._of.pop(loader, None)

    def share(self, loader: object) -> bool:
        """Whether the thread that takes this loader's steps takes those of another one of its job as well."""
        with self._lock:
            mine = self._of.get(loader)
            return mine is not None and any(other is not loader and of == mine for other, of in self._of.items())
