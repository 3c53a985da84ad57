"""A remote file of which only what is read is fetched, until so much is read that the whole of it is worth fetching.

prefetch   spans that will be read are asked for side by side, and wait in memory (pieces.py)
pread      a piece that is there or on its way, else a request of its own; reading on and on asks for more at a time
whole      once SHARE of the file has been read by ranges (GROUPED_SHARE where samples come in groups), the file is downloaded
           into the cache in the background
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from headrace.observability.logs import pairs
from headrace.preprocessor.sources.blob import Blob, Span
from headrace.preprocessor.sources.download import RemoteFile, Retry
from headrace.preprocessor.sources.pieces import PIECES
from headrace.preprocessor.sources.range_requests import MOST_REQUESTS
from headrace.preprocessor.sources.ranges import NoRangesError, RangedFile

log = logging.getLogger(__name__)

SHARE = 1 / 8
"""Of a file, read by ranges, from which the whole of it is downloaded: no more than that is fetched twice."""
GROUPED_SHARE = 1 / 2
"""The same of a file in which a sample is read with those beside it, as in a row group of Parquet: what has been read then says
little of how many samples are wanted."""
FIRST_BYTES = 16 * 2**10
"""Read with the first bytes of a file: where an index stands there, mostly all of it."""
WINDOW_BYTES = 2 * 2**10
"""Least bytes of a request: a header, and what is beside it."""
MOST_WINDOW_BYTES = 4 * 2**20
_MOST_LEAST_BYTES = 3 * 2**10
_NEAR_BYTES = 4 * 2**10  # between spans that are asked for together, and between reads of which one goes on from the other
_AGAIN_S = 60.0  # from a download that failed, or for which there was no room, to the next try
_WHOLE_THREADS = 2

_requests = ThreadPoolExecutor(MOST_REQUESTS, thread_name_prefix="ranges")
_serials = itertools.count()


class PartialBlob(Blob):
    """A remote file, read by ranges or, where it has been fetched meanwhile, from the cache. Thread-safe."""

    def __init__(self, file: RemoteFile, retry: Retry, fetch: Callable[[], Blob], *, grouped: bool = False) -> None:
        """`file` must be of a known size. `fetch` downloads it into the cache, if that has room for it, and opens it.

        `grouped`: a sample is read with those beside it.
        """
        assert file.size is not None, "a file of unknown size is fetched whole"
        self.size = file.size
        self._file = file
        self._ranged = RangedFile(file, retry)
        self._fetch = fetch
        self._most_in_ranges = (GROUPED_SHARE if grouped else SHARE) * file.size
        self._whole: Blob | None = None
        self._serial = next(_serials)
        self._lock = threading.Lock()
        self._window = _Window()
        self.least_bytes = WINDOW_BYTES
        """With which one more reader begins to read: what those before have found to be enough."""
        self._read_bytes = 0
        self._is_fetching = False
        self._not_before_s = 0.0
        self._closed = False
        weakref.finalize(self, PIECES.forget, self._serial)

    @property
    def version(self) -> str:
        """URL and version of the file."""
        return f"{self._file.url} {self._file.version}"

    @property
    def is_local(self) -> bool:
        """Whether the file is in the cache by now."""
        return self._whole is not None and self._whole.is_local

    def pread(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; see `Blob.pread`. Raises DatasetError where the file has changed."""
        return self.pread_in(self._window, offset, size)

    def pread_in(self, window: _Window, offset: int, size: int, *, is_overhead: bool = False) -> bytes:
        """Return the same to one of several readers, each of which has a window of its own.

        `is_overhead`: what is read is none of the samples, and no reason to fetch the whole file.
        """
        if (whole := self._whole) is not None:
            return whole.pread(offset, size)
        stop = min(offset + size, self.size)
        if stop <= offset:
            return b""
        try:
            data = PIECES.get(self._serial, offset, stop)
        except Exception:  # of a request that was made ahead; the next one tells what is wrong
            data = None
        if data is not None:
            window.end = max(window.end, stop) if window.end >= offset else stop
            return data
        end = min(self.size, offset + max(stop - offset, window.next_bytes(offset)))
        data = self._read(offset, end, is_overhead=is_overhead)
        window.end = end
        if (end > stop or is_overhead) and self._whole is None:
            PIECES.put(self._serial, offset, data)
        return data[: stop - offset]

    def view(self, offset: int, size: int) -> memoryview:
        """Return the same as `pread`, mapped into memory once the file is in the cache."""
        return memoryview(self.pread(offset, size)) if self._whole is None else self._whole.view(offset, size)

    def arrow_file(self) -> pa.NativeFile:
        """Return a file over the blob for Arrow; see `Blob.arrow_file`."""
        return super().arrow_file() if self._whole is None else self._whole.arrow_file()

    def reader(self) -> Blob:
        """Return the same file for one more reader of headers, who goes on from a place of its own. Closing that does nothing."""
        return _Reader(self)

    def prefetch(self, spans: Sequence[Span]) -> None:
        """Ask for spans that will be read soon, as far as there is room for them in memory."""
        if self._whole is not None or self._closed:
            return
        for start, stop in _requests_for(spans, self.size):
            if PIECES.covers(self._serial, start, stop):
                continue
            content = PIECES.promise(self._serial, start, stop)
            if content is not None:
                _requests.submit(self._fulfil, content, start, stop)

    def fetch_whole(self) -> None:
        """Fetch the file into the cache now, since all of it will be read. Raises DatasetError where that fails."""
        with self._lock:
            if self._whole is None:
                self._keep(self._fetch())

    def close(self) -> None:
        """Close the file; what was read of it is dropped from memory."""
        self._closed = True
        PIECES.forget(self._serial)
        if self._whole is not None:
            self._whole.close()

    def _keep(self, whole: Blob) -> None:
        """Read from the whole file from now on; or go on by ranges for a while, where the cache has no room for it."""
        if whole.is_local:
            self._whole = whole
            PIECES.forget(self._serial)
        else:
            whole.close()
            self._not_before_s = time.monotonic() + _AGAIN_S

    def _fulfil(self, content: Future[bytes], start: int, stop: int) -> None:
        try:
            content.set_result(self._read(start, stop, is_ahead=True))
        except BaseException as err:
            content.set_exception(err)

    def _read(self, start: int, stop: int, *, is_overhead: bool = False, is_ahead: bool = False) -> bytes:
        """Read a range of the file from its server, or of the whole file, where the server sends no ranges.

        What is read ahead is not tried again: that is left to whoever needs it.
        """
        if self._closed:
            raise ValueError(f"{self._file.url} is closed")
        try:
            data = self._ranged.read(start, stop, once=is_ahead)
        except NoRangesError:
            with self._lock:
                if self._whole is None:
                    self._whole = self._fetch()
            return self._whole.pread(start, stop - start)
        with self._lock:
            self._read_bytes += 0 if is_overhead else stop - start
            is_due = self._read_bytes > self._most_in_ranges and not self._is_fetching
            is_due &= time.monotonic() > self._not_before_s
            self._is_fetching |= is_due
        if is_due:
            in_background(weakref.WeakMethod(self._fetch_in_background))
        return data

    def _fetch_in_background(self) -> None:
        try:
            if self._whole is None and not self._closed:
                self._keep(self._fetch())
        except Exception as err:  # whoever reads is told what is wrong
            log.info("not fetched ahead %s", pairs(shard=self._file.url, error=repr(err)))
            self._not_before_s = time.monotonic() + _AGAIN_S
        finally:
            self._is_fetching = False


class _Window:
    """Where one reader of a file is, and how much of it to read at a time."""

    def __init__(self, least_bytes: int = WINDOW_BYTES) -> None:
        self.least_bytes = least_bytes
        """Of a read anywhere else than behind the last one. As much as was wanted behind such reads before."""
        self.end = -1
        self._begin = 0
        self._bytes = least_bytes

    def next_bytes(self, offset: int) -> int:
        """Return how much to read at `offset` at least: twice as much as before where the reader has gone on to there."""
        if offset == 0:
            return FIRST_BYTES
        if 0 <= offset - self.end <= _NEAR_BYTES:
            self._bytes = min(2 * self._bytes, MOST_WINDOW_BYTES)
            wanted = offset + WINDOW_BYTES // 4 - self._begin  # a header of a tar has a quarter
            if wanted <= _MOST_LEAST_BYTES:  # a longer read, such as a search, says nothing of windows
                self.least_bytes = max(self.least_bytes, wanted)
        else:
            self._begin, self._bytes = offset, self.least_bytes
        return self._bytes


class _Reader(Blob):
    """A partial file, read with a window of its own."""

    def __init__(self, blob: PartialBlob) -> None:
        self._blob = blob
        self._window = _Window(blob.least_bytes)
        self.size = blob.size

    def pread(self, offset: int, size: int) -> bytes:
        data = self._blob.pread_in(self._window, offset, size, is_overhead=True)
        self._blob.least_bytes = max(self._blob.least_bytes, self._window.least_bytes)
        return data

    def close(self) -> None:
        pass


def _requests_for(spans: Sequence[Span], size: int) -> Iterator[Span]:
    """Yield the requests to make for spans of a file: those that are near each other together, long ones in pieces."""
    merged: list[Span] = []
    for start, stop in sorted((start, min(stop, size)) for start, stop in spans):
        if merged and start <= merged[-1][1] + _NEAR_BYTES and stop - merged[-1][0] <= MOST_WINDOW_BYTES:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        elif start < stop:
            merged.append((start, stop))
    for start, stop in merged:
        yield start, stop


_queue: queue.SimpleQueue[weakref.WeakMethod[Callable[[], None]]] = queue.SimpleQueue()
_workers: list[threading.Thread] = []
_workers_lock = threading.Lock()


def in_background(work: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Do some work when its turn comes, unless its object is gone by then. No process waits for it to end."""
    with _workers_lock:
        if len(_workers) < _WHOLE_THREADS:
            _workers.append(threading.Thread(target=_work_on, name=f"whole-{len(_workers)}", daemon=True))
            _workers[-1].start()
    _queue.put(work)


def _work_on() -> None:
    while True:
        if (work := _queue.get()()) is not None:
            work()
            del work
