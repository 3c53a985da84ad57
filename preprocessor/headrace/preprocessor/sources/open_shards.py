"""The indexed shards that a process keeps open: as many as its jobs want, within the limit on open files.

An open shard takes a file descriptor. Before these run out, the least recently used shard of any job is dropped; it
is opened again when it is needed, which is slower and logged once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import resource
import threading
from collections import OrderedDict
from weakref import WeakKeyDictionary

from headrace.observability.logs import pairs
from headrace.preprocessor.sources import Shard

log = logging.getLogger(__name__)

MOST_FILES = 2**20  # containers have hard limits a thousand times as high, which nobody needs
_OTHER_FILES = 256  # connections of trainers, shards that are being unpacked, media files that JSONL names
_LEAST_SHARDS = 8


def raise_file_limit() -> None:
    """Raise this process's soft limit on open files to its hard limit, at most MOST_FILES, if the system permits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _file_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def max_open_shards(files: int) -> int:
    """Return how many shards may be open at a time in a process that may have `files` files open."""
    return max(_LEAST_SHARDS, files - min(_OTHER_FILES, files // 2))


class ShardSlot:
    """Holder of one shard of a job, which is open or being opened by the thread that holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shard: Shard | None = None
        self.used = 0


class OpenShards:
    """The open shards of all jobs of a process, each in a slot. Thread-safe.

    Dropping a slot does not close its shard, because another thread may be reading from it; the last reference does.
    """

    def __init__(self, most: int | None = None) -> None:
        """Allow at most `most` open shards; None allows as many as the limit on open files does."""
        self._most = max_open_shards(_file_limit()) if most is None else most
        self._jobs: WeakKeyDictionary[object, OrderedDict[int, ShardSlot]] = WeakKeyDictionary()
        self._uses = itertools.count()
        self._warned = False
        self._lock = threading.Lock()

    def slot(self, job: object, shard: int, wanted: int) -> ShardSlot:
        """Return the slot of a job's shard, given by number, as the most recently used one.

        `wanted` is the most slots that the job keeps. Slots beyond it or the process's limit are dropped, the least recently
        used first.
        """
        with self._lock:
            slots = self._jobs.setdefault(job, OrderedDict())
            slot = slots.setdefault(shard, ShardSlot())
            slots.move_to_end(shard)
            slot.used = next(self._uses)
            while len(slots) > wanted:
                slots.popitem(last=False)
            while sum(map(len, self._jobs.values())) > self._most:
                self._drop_oldest(wanted)
            return slot

    def remove_job(self, job: object) -> list[ShardSlot]:
        """Remove a job's slots and return them."""
        with self._lock:
            return list(self._jobs.pop(job, {}).values())

    def _drop_oldest(self, wanted: int) -> None:
        held = (slots for slots in self._jobs.values() if slots)
        min(held, key=lambda slots: next(iter(slots.values())).used).popitem(last=False)
        if not self._warned:
            self._warned = True
            log.warning(
                "fewer shards stay open than a job reads side by side: raise the limit of open files (ulimit -n) %s",
                pairs(open_shards=self._most, wanted=wanted, open_files=_file_limit()),
            )
