"""Prefetching of parts from the preprocessors that have them; they are held until the consumer releases them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace.errors import NotFoundError, UnavailableError
from headrace.observability import metrics, tracing
from headrace.observability.logs import pairs
from headrace.ticket import part_of
from headrace.trainer.loading.hedging import HEDGE_S, Hedging
from headrace.trainer.loading.part_client import FetchedPart, PartClient
from headrace.trainer.loading.session import RETRY_S
from headrace.trainer.loading.statistics import FetchStatistics
from headrace.transport.base import TRANSPORTS, DamagedError

log = logging.getLogger(__name__)

_ORDER_S = 0.5  # a preprocessor may get the order to decode a part so long after the part's location is known here
_ORDER_RETRY_S = 0.01  # pause before a part is requested again within _ORDER_S
_MAX_THREADS = 256  # reached only if a whole fleet hangs; threads are started as they are needed


class _Location(NamedTuple):
    """The preprocessor where a part is, under a lease, and when this was told (monotonic seconds)."""

    lease: str
    endpoint: str
    told_s: float
    left_out: frozenset[int] = frozenset()
    """Ids of samples that no current copy of the part has any more."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Wanted:
    """A part that is wanted but not received yet, and the attempts to fetch it."""

    ticket: str
    future: Future[FetchedPart]
    attempts: dict[str, float] = field(default_factory=dict)
    """Pending attempts: the endpoints that were asked, and when (monotonic seconds)."""
    asked_lease: str = ""
    failed_lease: str = ""
    is_awaited: bool = False
    """Whether the consumer is waiting for this part."""


class PartFetcher:
    """Fetches parts ahead of their consumer, in the order in which they are queued, so that few of them lie ready. Thread-safe.

    A part is fetched once its location, the preprocessor that has it, is known, and from every newer location as well: the first
    delivery counts, later ones are released at once. A location that fails, or from which the consumer waits for a part past its
    deadline (`Hedging`), is reported, so that the part gets another one. No more than `threads` attempts, and one more for the
    part that the consumer waits for, are pending at a preprocessor: one that hangs blocks only its own threads.
    """

    def __init__(
        self,
        report_lost: Callable[[str, str], None],
        *,
        max_parts: int,
        max_bytes: int,
        threads: int,
        transports: Sequence[str] = TRANSPORTS,
        columns: Sequence[str] | None = None,
        token: str | None = None,
        tls: str | Path | None = None,
        hedge_s: float = HEDGE_S,
        on_delivered: Callable[[], None] = lambda: None,
    ) -> None:
        """`report_lost(ticket, lease)`: asks for another location. At most `max_parts` parts, and about `max_bytes`, lie ready.

        `on_delivered()`: called, in any thread, when a part has come. `columns`: those of headrace.sample.SCHEMA to fetch;
        None: all. `token`, `tls`: as in `headrace.rpc.channel`. Raises UserError where a transport is unknown or `hedge_s` is not
        above 0.
        """
        self._report_lost = report_lost
        self._on_delivered = on_delivered
        self._max_parts = max_parts
        self._max_bytes = max_bytes
        self._threads = threads
        self._hedging = Hedging(hedge_s)
        self._make_client = partial(PartClient, transports, token=token, tls=tls)
        self._client = self._make_client(columns)
        self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="fetch")
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards everything below
        self._locations: dict[str, _Location] = {}
        self._queue: deque[str] = deque()
        self._futures: dict[str, Future[FetchedPart]] = {}  # parts being fetched or ready, until they are taken
        self._wanted: dict[str, _Wanted] = {}  # parts not received yet, in the order of consumption
        self._pending: Counter[str] = Counter()  # number of pending attempts by endpoint
        self._taken: dict[str, tuple[Callable[[], None], int]] = {}  # release function and size in bytes
        self._ready_bytes = 0
        self._num_parts: Counter[str] = Counter()
        self._received_bytes = self._num_hedged = self._num_fetched_again = self._num_late = 0
        self._error: BaseException | None = None

    def queue(self, tickets: Iterable[str]) -> None:
        """Append parts to those to be fetched, in the order of consumption."""
        with self._lock:
            self._queue.extend(tickets)
            self._fetch_ahead()

    def set_location(self, ticket: str, lease: str, endpoint: str, left_out: Iterable[int] = ()) -> None:
        """Set the location of a part. `left_out`: samples that no copy may have from now on; a copy that has them is refused."""
        with self._lock:
            self._locations[ticket] = _Location(lease, endpoint, time.monotonic(), frozenset(left_out))
            if ticket in self._wanted:
                self._ask(self._wanted[ticket])

    def have_arrived(self, tickets: Iterable[str]) -> bool:
        """Return whether `take` would return each of these parts without waiting."""
        with self._lock:
            return all(ticket in self._futures and self._futures[ticket].done() for ticket in tickets)

    def take(self, ticket: str) -> FetchedPart:
        """Wait for a queued part and return it; it may be read until it is released.

        Raises the error given to `fail` if the part can no longer come.
        """
        with self._lock:
            self._fetch_ahead(needed=ticket)
            if self._error is not None and ticket not in self._futures:
                raise self._error
            future, wanted = self._futures[ticket], self._wanted.get(ticket)
            if wanted is not None:
                wanted.is_awaited = True
                self._ask(wanted)
        if wanted is not None:
            self._await(wanted)
        part = future.result()
        with self._lock:
            del self._futures[ticket]
            self._ready_bytes -= part.num_bytes
            self._taken[ticket] = (part.delivery.release, part.num_bytes)
            self._fetch_ahead()
        return part

    def _await(self, wanted: _Wanted) -> None:
        """Wait until the part has come or can no longer come, hedging it meanwhile."""
        awaited_s = time.monotonic()
        while not wanted.future.done():
            pause_s = self._hedge(wanted, awaited_s) - time.monotonic()
            wait([wanted.future], timeout=min(max(0.0, pause_s), threading.TIMEOUT_MAX))

    def release(self, tickets: Iterable[str]) -> None:
        """Give those of these parts that were taken back to their preprocessors; the consumer must not read them any more."""
        with self._lock:
            taken = [self._taken.pop(ticket) for ticket in tickets if ticket in self._taken]
        for release, _ in taken:
            release()

    def drop(self, tickets: Iterable[str]) -> None:
        """Cancel queued parts that nobody will take, and give those that have come back to their preprocessors."""
        came = []
        with self._lock:
            dropped = set(tickets)
            self._queue = deque(ticket for ticket in self._queue if ticket not in dropped)
            for ticket in dropped & self._futures.keys():
                future = self._futures.pop(ticket)
                if ticket in self._wanted:
                    self._settle(self._wanted[ticket], UnavailableError(f"part {part_of(ticket)} is not wanted any more"))
                elif future.exception() is None:
                    self._ready_bytes -= future.result().num_bytes
                    came.append(future.result().delivery)
            self._fetch_ahead()
        for delivery in came:
            delivery.release()

    def set_columns(self, columns: Sequence[str]) -> None:
        """Set the columns to fetch of parts queued from now on. All parts queued before must have been taken or dropped."""
        former, self._client = self._client, self._make_client(columns)
        former.close()

    def forget(self, tickets: Iterable[str]) -> None:
        """Forget the locations of parts that are not needed any more."""
        with self._lock:
            for ticket in tickets:
                self._locations.pop(ticket, None)

    def fail(self, error: BaseException) -> None:
        """Raise `error` in whoever takes a part that still needs a location, since no further locations will be told."""
        with self._lock:
            self._error = error
            self._ask_all()

    def go_on(self) -> None:
        """Fetch again after `fail`, as locations of other parts will be told."""
        with self._lock:
            self._error = None

    def close(self) -> None:
        """Stop fetching, and release every part, including those that the consumer has taken."""
        error = UnavailableError("the loader is closed")
        self.fail(error)
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()
        with self._lock:
            for wanted in list(self._wanted.values()):
                self._settle(wanted, error)
            futures, taken = list(self._futures.values()), list(self._taken)
        for future in futures:
            if future.exception() is None:
                future.result().delivery.release()
        self.release(taken)
        log.info("parts received %s", pairs(**self._num_parts, hedged=self._num_hedged, again=self._num_fetched_again))

    def statistics(self) -> FetchStatistics:
        """Return the counts of parts fetched so far and the bytes held now."""
        with self._lock:
            return FetchStatistics(
                num_parts=dict(self._num_parts),
                ready_bytes=self._ready_bytes,
                held_bytes=sum(num_bytes for _, num_bytes in self._taken.values()),
                num_pending=self._pending.total(),
                hedge_deadline_s=self._hedging.deadline_s,
                received_bytes=self._received_bytes,
                num_hedged=self._num_hedged,
                num_fetched_again=self._num_fetched_again,
                num_late=self._num_late,
            )

    # -- asking: the caller holds the lock ----------------------------------------------------------------------------

    def _fetch_ahead(self, needed: str | None = None) -> None:
        """Start on queued parts in order: on all up to `needed`, then on as many as the bounds allow."""
        while self._queue and self._error is None:
            bounded = len(self._futures) >= self._max_parts or self._ready_bytes >= self._max_bytes
            if bounded and (needed is None or needed in self._futures):
                break
            ticket = self._queue.popleft()
            future: Future[FetchedPart] = Future()
            self._futures[ticket] = future
            self._wanted[ticket] = _Wanted(ticket=ticket, future=future)
        self._ask_all()

    def _ask_all(self) -> None:
        for wanted in list(self._wanted.values()):
            self._ask(wanted)

    def _ask(self, wanted: _Wanted) -> None:
        """Start to fetch a part from its present location, unless that was done or a bound on attempts or bytes is reached."""
        location = self._locations.get(wanted.ticket)
        if wanted.future.done():
            return
        if self._error is not None:
            if not wanted.attempts:
                self._settle(wanted, self._error)
            return
        if location is None or location.lease == wanted.failed_lease or location.endpoint in wanted.attempts:
            return
        if self._pending[location.endpoint] >= self._threads + wanted.is_awaited:
            return
        if self._ready_bytes >= self._max_bytes and not wanted.is_awaited:
            return
        if wanted.asked_lease not in ("", location.lease):
            self._num_fetched_again += 1
            metrics.PARTS_REFETCHED.inc()
        self._pending[location.endpoint] += 1
        wanted.asked_lease = location.lease
        wanted.attempts[location.endpoint] = time.monotonic()
        self._pool.submit(self._attempt, wanted, location)

    def _settle(self, wanted: _Wanted, result: FetchedPart | BaseException) -> None:
        """Set the result or error of a wanted part, unless it has one already."""
        if wanted.future.done():
            return
        del self._wanted[wanted.ticket]
        if isinstance(result, BaseException):
            wanted.future.set_exception(result)
        else:
            self._ready_bytes += result.num_bytes
            wanted.future.set_result(result)

    # -- attempts: threads of the pool --------------------------------------------------------------------------------

    def _attempt(self, wanted: _Wanted, location: _Location) -> None:
        """Fetch a part once, from one location."""
        try:
            with tracing.span("fetch", wanted.ticket, endpoint=location.endpoint):
                part = self._client.fetch(location.endpoint, wanted.ticket)
        except (NotFoundError, UnavailableError) as err:
            self._failed(wanted, location, err)
        except Exception as err:  # of any kind: the consumer raises it
            with self._lock:
                self._pop_attempt(wanted, location)
                self._settle(wanted, err)
        else:
            if self._is_current(wanted, part):
                self._delivered(wanted, location, part)
            else:
                part.delivery.release()
                self._failed(wanted, location, UnavailableError("the copy has samples that other ranks' copies lack"))

    def _is_current(self, wanted: _Wanted, part: FetchedPart) -> bool:
        """Return whether the copy lacks all samples that, as known by now, no copy may have."""
        with self._lock:
            location = self._locations.get(wanted.ticket)
        return location is None or location.left_out <= {item.sample_id for item in part.rejected}

    def _delivered(self, wanted: _Wanted, location: _Location, part: FetchedPart) -> None:
        with self._lock:
            asked_s = self._pop_attempt(wanted, location)
            self._hedging.record_answer(location.endpoint, time.monotonic() - asked_s)
            is_late = wanted.future.done()
            self._num_parts[part.delivery.transport] += 1
            self._received_bytes += part.num_bytes
            metrics.PARTS_RECEIVED.labels(part.delivery.transport).inc()
            metrics.RECEIVED_BYTES.inc(part.num_bytes)
            self._num_late += is_late
            self._settle(wanted, part)
            self._ask_all()
        if is_late:
            part.delivery.release()
        else:
            self._on_delivered()

    def _failed(self, wanted: _Wanted, location: _Location, err: Exception) -> None:
        """Note a failed attempt. Unless the part came or moved, report the location as lost or, after a pause, ask it again."""
        if isinstance(err, DamagedError):
            metrics.PARTS_CORRUPT.inc()
        with self._lock:
            self._pop_attempt(wanted, location)
            self._hedging.record_answer(location.endpoint)
            current = self._locations.get(wanted.ticket)
            is_lost = current is not None and current.lease == location.lease and not wanted.future.done() and self._error is None
            if is_lost:
                wanted.failed_lease = location.lease  # not asked until the part has a new lease, or is asked again below
            self._ask_all()
        if not is_lost:
            return
        if isinstance(err, NotFoundError) and time.monotonic() < location.told_s + _ORDER_S:
            log.debug("not there yet part=%s endpoint=%s", part_of(wanted.ticket), location.endpoint)
            pause_s = _ORDER_RETRY_S
        else:
            log.warning("fetch failed part=%s endpoint=%s: %s", part_of(wanted.ticket), location.endpoint, err)
            if self._report(wanted, location):
                return
            pause_s = RETRY_S
        self._closed.wait(pause_s)
        with self._lock:
            wanted.failed_lease = ""
            self._ask(wanted)

    def _pop_attempt(self, wanted: _Wanted, location: _Location) -> float:
        """Remove a pending attempt, and return when it began (monotonic seconds). The caller holds the lock."""
        self._pending[location.endpoint] -= 1
        if not self._pending[location.endpoint]:
            del self._pending[location.endpoint]
        return wanted.attempts.pop(location.endpoint)

    def _hedge(self, wanted: _Wanted, awaited_s: float) -> float:
        """Report the location of an awaited part as lost if its deadline has passed. Return when to call this again."""
        with self._lock:
            now_s = time.monotonic()
            next_s = now_s + self._hedging.deadline_s
            location = self._locations.get(wanted.ticket)
            if location is None or location.lease == wanted.failed_lease or self._error is not None:
                return next_s
            asked_s = wanted.attempts.get(location.endpoint, awaited_s)
            due_s = self._hedging.due_s(location.endpoint, awaited_s=awaited_s, asked_s=asked_s)
            if now_s < due_s or wanted.future.done():
                return due_s
            self._hedging.mark_stalled(location.endpoint)
            self._num_hedged += 1
            metrics.PARTS_HEDGED.inc()
            self._pool.submit(self._report, wanted, location)
        log.warning("hedged %s", pairs(part=part_of(wanted.ticket), endpoint=location.endpoint, waited_s=now_s - awaited_s))
        return next_s

    def _report(self, wanted: _Wanted, location: _Location) -> bool:
        """Report a location as lost. Return False if the service could not be told: the location is to be asked again."""
        try:
            self._report_lost(wanted.ticket, location.lease)
        except (NotFoundError, UnavailableError) as err:
            log.warning("report of a lost part failed part=%s: %s", part_of(wanted.ticket), err)
            return False
        except Exception as err:  # for example, another process took over: the consumer raises it
            with self._lock:
                self._settle(wanted, err)
        return True
