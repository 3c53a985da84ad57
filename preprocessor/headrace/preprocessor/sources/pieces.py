"""What has been read of remote files by ranges and is not used yet: pieces in memory, bounded for the whole process."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

MOST_BYTES = 64 * 2**20
STALE_S = 30.0
"""Age from which a piece that nobody has read makes room for others."""
_OVERLAPPING = 4  # pieces in front of a place that are looked at: they seldom overlap


@dataclass(slots=True, kw_only=True)
class _Piece:
    stop: int
    content: Future[bytes]
    since_s: float
    used: bool = False


class Pieces:
    """Pieces of files by (file, offset), the oldest of which are dropped first. Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = most_bytes
        self._now_s = now_s
        self._lock = threading.Lock()
        self._held_bytes = 0
        self._pieces: OrderedDict[tuple[int, int], _Piece] = OrderedDict()
        self._starts: dict[int, list[int]] = {}
        self._forgotten: deque[int] = deque()

    def get(self, file: int, start: int, stop: int) -> bytes | None:
        """Return the bytes from `start` to `stop` of a file, waiting for a piece that is on its way; None where no piece has
        them. Raises what the request for the piece raised, which is then forgotten."""
        with self._lock:
            begin = self._begin(file, start, stop)
            if begin is None:
                return None
            piece = self._pieces[file, begin]
            piece.used = True
        try:
            return piece.content.result()[start - begin : stop - begin]
        except BaseException:
            with self._lock:
                if self._pieces.get((file, begin)) is piece:
                    self._drop(file, begin)
            raise

    def covers(self, file: int, start: int, stop: int) -> bool:
        """Whether a piece has these bytes, or will have them."""
        with self._lock:
            return self._begin(file, start, stop) is not None

    def promise(self, file: int, start: int, stop: int) -> Future[bytes] | None:
        """Add a piece whose content will be set in the future that is returned; None where there is no room for it."""
        with self._lock:
            self._drop_forgotten()
            if (file, start) in self._pieces or not self._make_room(stop - start):
                return None
            content: Future[bytes] = Future()
            self._pieces[file, start] = _Piece(stop=stop, content=content, since_s=self._now_s())
            insort(self._starts.setdefault(file, []), start)
            self._held_bytes += stop - start
            return content

    def put(self, file: int, start: int, data: bytes) -> None:
        """Add a piece that is there, if there is room for it."""
        if (content := self.promise(file, start, start + len(data))) is not None:
            content.set_result(data)

    def forget(self, file: int) -> None:
        """Drop all pieces of a file that nobody reads any more: now, or with the next promise where the lock is held. That may be
        by this very thread, as the garbage collector calls this at any place for a file that was not closed."""
        self._forgotten.append(file)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_forgotten()
            finally:
                self._lock.release()

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            file = self._forgotten.popleft()
            for start in self._starts.pop(file, []):
                piece = self._pieces.pop((file, start))
                self._held_bytes -= piece.stop - start

    def _begin(self, file: int, start: int, stop: int) -> int | None:
        starts = self._starts.get(file, [])
        place = bisect_right(starts, start)
        near = starts[max(0, place - _OVERLAPPING) : place]
        return next((begin for begin in reversed(near) if self._pieces[file, begin].stop >= stop), None)

    def _make_room(self, size: int) -> bool:
        if self._held_bytes + size <= self._most_bytes:
            return True
        stale_s = self._now_s() - STALE_S
        for key in [key for key, piece in self._pieces.items() if piece.used or piece.since_s < stale_s]:
            if self._held_bytes + size <= self._most_bytes:
                break
            self._drop(*key)
        return self._held_bytes + size <= self._most_bytes

    def _drop(self, file: int, start: int) -> None:
        piece = self._pieces.pop((file, start))
        self._starts[file].remove(start)
        if not self._starts[file]:
            del self._starts[file]
        self._held_bytes -= piece.stop - start


PIECES = Pieces()
