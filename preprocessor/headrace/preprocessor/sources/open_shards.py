"""Indexed shards that are open in a process: as many as its jobs like to have, and no more than it may have files open.

An open shard has one or two descriptors. Where they would run out, the shard that was not read for longest is dropped, of
whichever job, and is opened again when it is needed: slower, and told once.
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

MOST_FILES = 2**20  # hard limits of containers are a thousand times as high, and nobody needs that
_FILES_OF_A_SHARD = 2  # of Parquet: ours, and Arrow's
_OTHER_FILES = 256  # connections of trainers, downloads, pictures that JSONL names
_LEAST_SHARDS = 8


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _file_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def most_shards(files: int) -> int:
    """That can be open at a time, where so many files can."""
    return max(_LEAST_SHARDS, (files - min(_OTHER_FILES, files // 2)) // _FILES_OF_A_SHARD)


class Slot:
    """A shard that is open, or being opened by whoever holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shard: Shard | None = None
        self.used = 0


class OpenShards:
    """The slots of all jobs. Thread-safe.

    A slot that is dropped is closed with its last reader's reference, not here: another thread may be reading from it.
    """

    def __init__(self, most: int | None = None) -> None:
        """`most`: None: as many as the limit of files allows."""
        self._most = most_shards(_file_limit()) if most is None else most
        self._jobs: WeakKeyDictionary[object, OrderedDict[int, Slot]] = WeakKeyDictionary()
        self._uses = itertools.count()
        self._told = False
        self._lock = threading.Lock()

    def slot(self, job: object, shard: int, wanted: int) -> Slot:
        """That of a job's shard, by number. `wanted`: slots that the job likes to have."""
        with self._lock:
            slots = self._jobs.setdefault(job, OrderedDict())
            slot = slots.setdefault(shard, Slot())
            slots.move_to_end(shard)
            slot.used = next(self._uses)
            while len(slots) > wanted:
                slots.popitem(last=False)
            while sum(map(len, self._jobs.values())) > self._most:
                self._drop_oldest(wanted)
            return slot

    def take(self, job: object) -> list[Slot]:
        """The slots of a job, which are not kept any longer."""
        with self._lock:
            return list(self._jobs.pop(job, {}).values())

    def _drop_oldest(self, wanted: int) -> None:
        held = (slots for slots in self._jobs.values() if slots)
        min(held, key=lambda slots: next(iter(slots.values())).used).popitem(last=False)
        if not self._told:
            self._told = True
            log.warning(
                "fewer shards stay open than a job reads side by side: raise the limit of open files (ulimit -n) %s",
                pairs(open_shards=self._most, wanted=wanted, open_files=_file_limit()),
            )
