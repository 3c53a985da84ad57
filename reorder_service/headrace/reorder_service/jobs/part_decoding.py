"""The decoding of parts by the preprocessors: several small ones in a lot, under one lease, and each by itself after any trouble.

What a lease takes of the event loop does not depend on the number of its samples. So parts of few samples share one. A lot that
a preprocessor fails at is broken up into its parts, which the others are then asked for: agreement on the samples that are left
out, and retries, are of single parts only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from headrace.observability.logs import pairs
from headrace.quarantine import Rejected
from headrace.reorder_service.fleet.member import Trial, Work
from headrace.reorder_service.fleet.reports import ANSWERS
from headrace.reorder_service.jobs import fleet_messages
from headrace.reorder_service.jobs.planned_step import PlannedPart
from headrace.reorder_service.jobs.work_orders import RETRY_PAUSES_S, Orders, WorkKind
from headrace.sample import SampleRef
from headrace.v1.fleet_pb2 import DecodePart, FleetOrder

log = logging.getLogger(__name__)

_T = TypeVar("_T")

LOTS_PER_MEMBER = 2  # at least, that a step's parts make, so that members of different speed can share them


def lots_of(parts: Iterable[PlannedPart], *, most_samples: int, num_members: int) -> Iterator[Sequence[PlannedPart]]:
    """Yield the parts of a step in lots, in the order in which trainers need them.

    A lot has parts of the same microbatches of different replicas, of at most `most_samples` samples together where it has
    several, and there are no fewer than LOTS_PER_MEMBER lots for each of the members of the fleet, unless there are fewer parts.
    """
    in_order = sorted(parts, key=lambda part: (part.microbatch, part.replica))  # stable: parts of one microbatch stay in order
    most_parts = max(1, len(in_order) // max(1, LOTS_PER_MEMBER * num_members))
    lot: list[PlannedPart] = []
    num_samples = 0
    for part in in_order:
        is_full = len(lot) == most_parts or num_samples + len(part.samples) > most_samples
        if lot and (is_full or part.microbatch != lot[0].microbatch):
            yield lot
            lot, num_samples = [], 0
        lot.append(part)
        num_samples += len(part.samples)
    if lot:
        yield lot


class Decoding:
    """What the parts of one step have in common: the orders to decode them, and what follows."""

    def __init__(
        self,
        orders: Orders,
        step: int,
        *,
        on_placed: Callable[[PlannedPart], None],
        on_failed: Callable[[str], None],
        urgent: Callable[[], bool],
        wanted: Callable[[], bool],
    ) -> None:
        """`on_placed`: called each time that a preprocessor takes a part. `on_failed`: called with a sentence where none can
        decode a part, after some pauses. `urgent`: whether trainers wait for the step now. `wanted`: whether retries are still
        worthwhile.
        """
        self.orders, self.step = orders, step
        self.on_placed, self.on_failed, self.urgent, self.wanted = on_placed, on_failed, urgent, wanted

    def submit(self, lot: Sequence[PlannedPart]) -> None:
        """Have parts decoded under one lease, and kept until the fleet releases their `work`."""
        work = self.work_alone(lot[0]) if len(lot) == 1 else _LotDecoding(self, lot).start()
        for part in lot:
            part.work = work
        self.orders.fleet.submit(work)

    def work_alone(self, part: PlannedPart) -> Work:
        """Return the work of one part by itself, to submit."""
        return _PartDecoding(self, part).start()

    def work_on(self, parts: Sequence[PlannedPart], **of_kind: Any) -> Work:
        """Return a work on parts. `of_kind`: those of Work's fields that differ between a lot and a single part."""
        first = parts[0]
        return Work(
            job=self.orders.job,
            share=self.orders.share,
            priority=(self.step, WorkKind.DECODE, first.microbatch, first.replica),
            keep=True,
            urgent=self.urgent,
            shards=_summed(part.shards for part in parts),
            probed_by=_summed(part.probed_by for part in parts),
            trials=partial(self.trials, parts),
            **of_kind,
        )

    def message(self, part: PlannedPart) -> DecodePart:
        """Return the order to decode one part, to which lease and shards are to be added."""
        orders = self.orders
        return fleet_messages.decode_part(orders.job, part, self.step, self.priority_of(part), orders.killed(part.samples))

    def priority_of(self, part: PlannedPart) -> int:
        """Return the priority of a part at its preprocessor: the lower, the sooner a trainer needs it."""
        return (self.step << 40) + (part.microbatch << 20) + part.replica

    def trials(self, parts: Iterable[PlannedPart], work: Work) -> list[Trial]:
        """Return the trials of all samples of parts that preprocessors died with, except those that are found guilty already."""
        orders = self.orders
        return [
            orders.trial(work, ref, partial(self._try, part, ref))
            for part in parts
            for ref in part.samples
            if not orders.killed([ref])
        ]

    def _try(self, part: PlannedPart, ref: SampleRef, lease: str) -> FleetOrder:
        orders = self.orders
        return fleet_messages.try_sample(lease, orders.job, part, ref, self.step, self.priority_of(part), orders.manifest.message)


class _LotDecoding:
    """The decoding of several parts under one lease, until a preprocessor fails at any of them."""

    __slots__ = ("_decoding", "_parts")

    def __init__(self, decoding: Decoding, parts: Sequence[PlannedPart]) -> None:
        self._decoding, self._parts = decoding, parts

    def start(self) -> Work:
        return self._decoding.work_on(
            self._parts,
            order=self._order,
            answer_kind=ANSWERS["decode_parts"],
            on_done=self._done,
            on_failed=_never_as_a_whole,
            on_placed=self._placed,
            break_up=self._break_up,
        )

    def _order(self, lease: str) -> FleetOrder:
        shards = map(self._decoding.orders.manifest.message, sorted({shard for part in self._parts for shard in part.shards}))
        return fleet_messages.decode_parts(lease, [self._decoding.message(part) for part in self._parts], shards)

    def _placed(self, lease: str, endpoint: str) -> None:
        for part in self._parts:
            part.lease, part.endpoint = lease, endpoint
            self._decoding.on_placed(part)

    def _done(self, _result: Any, preprocessor: str) -> None:
        for part in self._parts:
            part.agreed.decoded(preprocessor)

    def _break_up(self) -> list[Work]:
        works = []
        for part in self._parts:
            part.work = self._decoding.work_alone(part)
            works.append(part.work)
        return works


def _summed(counts: Iterable[Mapping[_T, int]]) -> dict[_T, int]:
    """Return the sums of counts."""
    sums: dict[_T, int] = {}
    for some in counts:
        for item, count in some.items():
            sums[item] = sums.get(item, 0) + count
    return sums


def _never_as_a_whole(error: str) -> NoReturn:
    raise AssertionError(f"a lot is broken up before it fails: {error}")


class _PartDecoding:
    """The decoding of one part: its order, and what follows where preprocessors fail at it or differ about its samples."""

    __slots__ = ("_decoding", "_part", "_retry", "_waits")

    def __init__(self, decoding: Decoding, part: PlannedPart) -> None:
        self._decoding, self._part = decoding, part
        self._waits = iter(RETRY_PAUSES_S)
        self._retry: Callable[[str], None] | None = None

    def start(self) -> Work:
        """Return the work to submit. The part has it from then on; as it is the only one that has, all of it can be let go."""
        return self._decoding.work_on(
            [self._part],
            order=self._order,
            answer_kind=ANSWERS["decode_part"],
            on_done=self._done,
            on_failed=self._failed,
            on_damaged=self._damaged,
            on_placed=self._placed,
        )

    @property
    def _work(self) -> Work:
        assert self._part.work is not None, "the step is not committed"
        return self._part.work

    def _order(self, lease: str) -> FleetOrder:
        order = self._decoding.message(self._part)
        order.lease = lease
        order.shards.extend(map(self._decoding.orders.manifest.message, sorted(self._part.shards)))
        return FleetOrder(decode_part=order)

    def _placed(self, lease: str, endpoint: str) -> None:
        self._part.lease, self._part.endpoint = lease, endpoint
        self._decoding.on_placed(self._part)

    def _done(self, _result: Any, preprocessor: str) -> None:
        self._part.agreed.decoded(preprocessor)

    def _damaged(self, items: Sequence[Rejected], preprocessor: str) -> bool:
        of_part = {ref.sample_id for ref in self._part.samples}
        return self._part.agreed.claim(preprocessor, [item for item in items if item.sample_id in of_part])

    def _failed(self, error: str) -> None:
        agreed, work = self._part.agreed, self._work
        if not agreed.claims or agreed.decoded_by:
            if self._retry is None:
                self._retry = self._decoding.orders.after_pauses(RETRY_PAUSES_S, self._again, self._given_up, self._is_open)
            self._retry(error)
        elif work.late and (pause_s := next(self._waits, None)) is not None:  # a late preprocessor may decode it yet, or just has
            asyncio.get_running_loop().call_later(pause_s, self._look_again, error)
        else:
            self._leave_out()

    def _look_again(self, error: str) -> None:
        if self._is_open():
            self._failed(error)

    def _given_up(self, error: str) -> None:
        agreed = self._part.agreed
        if not agreed.claims:
            self._decoding.on_failed(error)
        elif not (agreed.decoded_by and self._decoding.orders.parts_are_shared()):
            self._leave_out()
        elif agreed.is_missed:
            self._decoding.on_failed(agreed.dispute())
        else:  # perhaps all ranks have fetched it, and no other copy is needed
            asyncio.get_running_loop().call_later(RETRY_PAUSES_S[-1], self._ask_again)

    def _leave_out(self) -> None:
        for item in self._part.agreed.leave_out():
            log.warning(
                "left out %s", pairs(job=self._decoding.orders.job, part=self._part.name, sample=item.name, reason=item.reason)
            )
        self._work.late = dict.fromkeys(self._work.late, False)  # answers to former orders do not count any more
        self._decoding.orders.fleet.submit(self._work)

    def _is_open(self) -> bool:
        return self._decoding.wanted() and self._work.lease is None

    def _ask_again(self) -> None:
        if self._is_open():
            self._decoding.orders.fleet.submit(self._again())

    def _again(self) -> Work:
        self._work.avoid |= self._part.agreed.claims.keys()
        return self._work
