"""Parts, fetched ahead of their consumer from wherever they are, and held until it has done with them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from headrace.errors import NotFoundError, UnavailableError
from headrace.telemetry import pairs
from headrace.transport.base import TRANSPORTS
from trainer.client import RETRY_S, Part, PartClient

log = logging.getLogger(__name__)


class PartFetcher:
    """A small pool fetches parts in the order in which they are queued, so that few of them lie ready. Thread-safe.

    A part is fetched when it has a place. Where the place does not deliver it, that is reported, and a newer one awaited.
    """

    def __init__(
        self,
        report_lost: Callable[[str, str], None],
        *,
        max_parts: int,
        max_bytes: int,
        threads: int,
        transports: Sequence[str] = TRANSPORTS,
    ) -> None:
        """`report_lost(ticket, lease)`: asks for another place. At most `max_parts` parts, and about `max_bytes`, lie ready.

        Raises UserError where `transports` are none that there are.
        """
        self._report_lost = report_lost
        self._max_parts = max_parts
        self._max_bytes = max_bytes
        self._client = PartClient(transports)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fetch")
        self._changed = threading.Condition()  # of all below
        self._places: dict[str, tuple[str, str]] = {}  # ticket -> (lease, endpoint)
        self._queue: deque[str] = deque()
        self._futures: dict[str, Future[Part]] = {}
        self._taken: dict[str, Callable[[], None]] = {}  # ticket -> what releases the part
        self._ready_bytes = 0
        self._error: BaseException | None = None

    def queue(self, tickets: Iterable[str]) -> None:
        """Parts that are consumed next, after those queued before."""
        with self._changed:
            self._queue.extend(tickets)
            self._fetch_ahead()

    def place(self, ticket: str, lease: str, endpoint: str) -> None:
        """Where a part is, from now on."""
        with self._changed:
            self._places[ticket] = (lease, endpoint)
            self._changed.notify_all()

    def take(self, ticket: str) -> Part:
        """Wait for a queued part and hand it over, to be read until it is released.

        Raises what `fail` was told where it can no longer come.
        """
        with self._changed:
            self._fetch_ahead(needed=ticket)
            if self._error is not None and ticket not in self._futures:
                raise self._error
            future = self._futures[ticket]
        part = future.result()
        with self._changed:
            del self._futures[ticket]
            self._ready_bytes -= part.num_bytes
            self._taken[ticket] = part.delivery.release
            self._fetch_ahead()
        return part

    def release(self, tickets: Iterable[str]) -> None:
        """The consumer reads these parts no more: those that it took go back to their preprocessors."""
        with self._changed:
            releases = [self._taken.pop(ticket) for ticket in tickets if ticket in self._taken]
        for release in releases:
            release()

    def forget(self, tickets: Iterable[str]) -> None:
        """These parts are not needed any more."""
        with self._changed:
            for ticket in tickets:
                self._places.pop(ticket, None)

    def fail(self, error: BaseException) -> None:
        """No further place will be told: whoever waits for one raises `error`."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        """Stop fetching, and release every part."""
        self.fail(UnavailableError("the loader is closed"))
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()
        with self._changed:
            futures, taken = list(self._futures.values()), list(self._taken)
        for future in futures:
            future.add_done_callback(_release_untaken)
        self.release(taken)
        log.info("parts received %s", pairs(**self._client.num_parts))

    def _fetch_ahead(self, needed: str | None = None) -> None:
        """Start fetching: `needed` in any case, then as far as the bounds allow. The caller holds the lock."""
        while self._queue and self._error is None:
            bounded = len(self._futures) >= self._max_parts or self._ready_bytes >= self._max_bytes
            if bounded and (needed is None or needed in self._futures):
                return
            ticket = self._queue.popleft()
            self._futures[ticket] = self._pool.submit(self._fetch, ticket)

    def _fetch(self, ticket: str) -> Part:
        """Until one preprocessor delivers the part."""
        failed_lease = ""
        while True:
            lease, endpoint = self._wait_for_place(ticket, failed_lease)
            try:
                part = self._client.fetch(endpoint, ticket)
            except (NotFoundError, UnavailableError) as err:
                if self._error is not None:
                    raise self._error from err
                log.warning("fetch failed ticket=%s endpoint=%s: %s", ticket, endpoint, err)
                failed_lease = self._report(ticket, lease)
                continue
            with self._changed:
                self._ready_bytes += part.num_bytes
            return part

    def _wait_for_place(self, ticket: str, failed_lease: str) -> tuple[str, str]:
        """(lease, endpoint) of a place that is newer than the one that failed."""
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                place = self._places.get(ticket)
                if place is not None and place[0] != failed_lease:
                    return place
                self._changed.wait()

    def _report(self, ticket: str, lease: str) -> str:
        """The lease that is lost; empty, after a pause, where nobody heard of it and the same place may be told again."""
        try:
            self._report_lost(ticket, lease)
        except (NotFoundError, UnavailableError) as err:
            log.warning("report of a lost part failed ticket=%s: %s", ticket, err)
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None, timeout=RETRY_S)
            return ""
        return lease


def _release_untaken(future: Future[Part]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().delivery.release()
