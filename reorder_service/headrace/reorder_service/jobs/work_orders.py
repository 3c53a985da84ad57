"""A job's orders to the preprocessors. What all of them have failed at is tried again after pauses, before the job gives up."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

from headrace.errors import JobFailedError
from headrace.observability.logs import pairs
from headrace.reorder_service.fleet.fleet import Fleet
from headrace.reorder_service.fleet.member import Trial, Work
from headrace.reorder_service.fleet.pace import FIRST_SAMPLES
from headrace.reorder_service.fleet.reports import ANSWERS
from headrace.reorder_service.jobs import fleet_messages
from headrace.reorder_service.jobs.counted_shards import CountedShards
from headrace.sample import SampleRef
from headrace.v1.fleet_pb2 import FleetOrder

log = logging.getLogger(__name__)

RETRY_PAUSES_S = (0.5, 1.0, 2.0, 4.0)  # a file system that went away may come back


class WorkKind(IntEnum):
    """Kinds of work of one step, in the order in which a busy fleet does them.

    Decoding an early step outranks probing a late one.
    """

    INDEX = 0
    PROBE = 1
    DECODE = 2


class Orders:
    """Gives the work of one job to the fleet of preprocessors, and collects the results, in one event loop."""

    def __init__(
        self, job: str, share: float, fleet: Fleet, manifest: CountedShards, parts_are_shared: Callable[[], bool] = lambda: False
    ) -> None:
        """`share`: the job's share of the fleet, relative to other jobs'. `manifest`: has the shards that orders read.

        `parts_are_shared`: whether several ranks fetch the same part, so that all copies of it must have the same samples.
        """
        self.parts_are_shared = parts_are_shared
        self.manifest = manifest
        self.job = job
        self.share = share
        self.fleet = fleet
        self._killed: dict[tuple[int, int], int] = {}
        """(shard, row) -> how many preprocessors died of the sample there. In memory only: a new leader finds it out again."""

    def killed(self, refs: Iterable[SampleRef]) -> dict[int, int]:
        """Return the ids of those samples that must not be touched any more, each with how many preprocessors died of it."""
        return (
            {ref.sample_id: deaths for ref in refs if (deaths := self._killed.get((ref.shard, ref.row)))} if self._killed else {}
        )

    def trial(self, of: Work, ref: SampleRef, order: Callable[[str], FleetOrder]) -> Trial:
        """Build the trial of one sample of a work, by an order of its own, to find the sample that kills preprocessors."""

        def on_guilty(deaths: int) -> None:
            self._killed[ref.shard, ref.row] = deaths
            where = self.manifest.message(ref.shard).name
            log.error("killed preprocessors %s", pairs(job=self.job, shard=where, row=ref.row, deaths=deaths))

        return Trial(self._attempt(of, order, {ref.shard: 1}), on_guilty)

    def _attempt(self, of: Work, order: Callable[[str], FleetOrder], shards: Mapping[int, int]) -> Work:
        return Work(
            job=self.job,
            share=self.share,
            priority=of.priority,
            order=order,
            answer_kind=of.answer_kind,
            on_done=lambda _result, _preprocessor: None,
            on_failed=lambda _error: None,
            urgent=of.urgent,
            shards=shards,
        )

    async def ask(
        self, priority: tuple[int, ...], order: Callable[[str], FleetOrder], shards: Mapping[int, int] | None = None
    ) -> Any:
        """Have any preprocessor carry out an order; return its report. Raises JobFailedError where none can, after some pauses.

        `order`: makes the order for a lease. `shards`: shard -> how many of its samples the order reads.
        """
        for pause_s in RETRY_PAUSES_S:
            try:
                return await self.ask_once(priority, order, shards)
            except JobFailedError:
                await asyncio.sleep(pause_s)
        return await self.ask_once(priority, order, shards)

    async def ask_once(
        self, priority: tuple[int, ...], order: Callable[[str], FleetOrder], shards: Mapping[int, int] | None = None
    ) -> Any:
        """Have any preprocessor carry out an order, and return its report. Each connected one is asked at most once.

        Raises JobFailedError where none can. The arguments are those of `ask`, which tries again.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(result: Any, _: str) -> None:
            if not future.done():
                future.set_result(result)

        def failed(error: str) -> None:
            if not future.done():
                future.set_exception(JobFailedError(error))

        def on_guilty(work: Work, deaths: int) -> None:
            """Leave the shard out as a whole, or fail the job where the order was to list the data set."""
            made = order("")
            if made.WhichOneof("order") == "index_shard":
                done(fleet_messages.deadly_shard(made.index_shard.shard.name, deaths), "")
            else:
                failed(f"listing the data set of job {self.job!r} killed {deaths} preprocessors, one after the other")
            self.fleet.release([work])

        work = Work(
            job=self.job,
            share=self.share,
            priority=priority,
            order=order,
            answer_kind=ANSWERS[str(order("").WhichOneof("order"))],
            on_done=done,
            on_failed=failed,
            shards=shards or {},
            trials=lambda work: [Trial(self._attempt(work, order, work.shards), partial(on_guilty, work))],
        )
        self.fleet.submit(work)
        return await future

    async def ask_in_pieces(
        self,
        priority: tuple[int, ...],
        samples: Sequence[SampleRef],
        order: Callable[[str, Sequence[SampleRef]], FleetOrder],
        take: Callable[[Any, str], bool],
    ) -> None:
        """Have preprocessors carry out an order on samples, each on as many at a time as suit it. Pauses and errors as in `ask`.

        `order`: makes the order for a lease and some of the samples. `take`: called with every report and its preprocessor's
        name until it returns True, when it has all. The same samples may be reported twice.
        """
        if samples:
            pieces = _Pieces(self, priority, samples, order, take)
            self.fleet.submit(pieces.rest(0, len(samples)))
            await pieces.all_taken

    def after_pauses(
        self,
        pauses_s: Sequence[float],
        again: Callable[[], Work],
        given_up: Callable[[str], None],
        wanted: Callable[[], bool],
    ) -> Callable[[str], None]:
        """Return the `on_failed` of a work: it submits `again()` after the next pause, if the work is still `wanted` then.

        When there are no pauses left, it calls `given_up` with the error.
        """
        pauses = iter(pauses_s)

        def submit() -> None:
            if wanted():
                self.fleet.submit(again())

        def failed(error: str) -> None:
            pause_s = next(pauses, None)
            if pause_s is None:
                given_up(error)
            else:
                asyncio.get_running_loop().call_later(pause_s, submit)

        return failed


class _Pieces:
    """Samples on which preprocessors carry out an order, each on as many at a time as suit it; see `Orders.ask_in_pieces`.

    No work refers to itself, so that all is let go with the last of them: full garbage collections are rare.
    """

    def __init__(
        self,
        orders: Orders,
        priority: tuple[int, ...],
        samples: Sequence[SampleRef],
        order: Callable[[str, Sequence[SampleRef]], FleetOrder],
        take: Callable[[Any, str], bool],
    ) -> None:
        self.all_taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._orders, self._priority, self._samples, self._make, self._take = orders, priority, samples, order, take
        self._shards = [ref.shard for ref in samples]

    def rest(self, begin: int, end: int, pauses_s: Sequence[float] = RETRY_PAUSES_S) -> Work:
        """Return a work on the samples from `begin` to `end` that is to be cut. Its first samples tell whom it is near to."""
        return self._work(begin, end, pauses_s, Counter(self._shards[begin : min(end, begin + FIRST_SAMPLES)]))

    def _work(self, begin: int, end: int, pauses_s: Sequence[float], shards: Mapping[int, int]) -> Work:
        again = partial(self.rest, begin, end, pauses_s[1:])
        return Work(
            job=self._orders.job,
            share=self._orders.share,
            priority=(*self._priority, begin),
            order=partial(self._order, begin, end),
            answer_kind=ANSWERS["probe_samples"],
            on_done=self._done,
            on_failed=self._orders.after_pauses(pauses_s[:1], again, self._given_up, self._is_wanted),
            cut=partial(self._cut, begin, end, pauses_s),
            shards=shards,
            trials=partial(self._trials, begin, end),
        )

    def _order(self, begin: int, end: int, lease: str) -> FleetOrder:
        return self._make(lease, self._samples[begin:end])

    def _cut(self, begin: int, end: int, pauses_s: Sequence[float], num_samples: int) -> tuple[Work, Work | None]:
        middle = min(begin + num_samples, end)
        piece = self._work(begin, middle, pauses_s, Counter(self._shards[begin:middle]))
        return piece, self.rest(middle, end, pauses_s) if middle < end else None

    def _is_wanted(self) -> bool:
        return not self.all_taken.done()

    def _done(self, report: Any, preprocessor: str) -> None:
        if self._is_wanted() and self._take(report, preprocessor):
            self.all_taken.set_result(None)

    def _given_up(self, error: str) -> None:
        if self._is_wanted():
            self.all_taken.set_exception(JobFailedError(error))

    def _trials(self, begin: int, end: int, work: Work) -> list[Trial]:
        samples, orders = self._samples[begin:end], self._orders
        return [orders.trial(work, ref, partial(self._try, ref)) for ref in samples if not orders.killed([ref])]

    def _try(self, ref: SampleRef, lease: str) -> FleetOrder:
        return self._make(lease, [ref])
