"""Steps for a node of a recoverable job: whole plans, and parts that outlast a change of its share of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace import codec
from headrace.errors import JobFailedError
from headrace.quarantine import Rejected
from headrace.trainer.loading.fetch import PartFetcher
from headrace.trainer.loading.session import Part
from headrace.trainer.loading.steps import Step
from headrace.trainer.pipeline.feed import PortionLoader, StepFeed, columns_of, tickets_of
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.recovery.layout import Layout
from headrace.transport.base import TRANSPORTS
from headrace.v1 import sessions_pb2

_CHECK_S = 0.02  # how often a node that waits for a plan looks whether there is a newer snapshot


class KeptParts:
    """Parts that were taken, until their step is over: an attempt that was cut off may have had them. Thread-safe."""

    def __init__(self, parts: PartFetcher) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._taken: dict[str, Future[Part]] = {}

    def have_come(self, tickets: Sequence[str]) -> bool:
        """As of PartFetcher."""
        return self._parts.have_come([ticket for ticket in tickets if ticket not in self._taken])

    def take(self, ticket: str) -> Part:
        """As of PartFetcher, and again."""
        with self._lock:
            taken = self._taken.get(ticket)
            if taken is None:
                mine = self._taken[ticket] = Future()
        if taken is not None:
            return taken.result()
        try:
            mine.set_result(self._parts.take(ticket))
        except BaseException as err:
            with self._lock:
                if self._taken.get(ticket) is mine:  # another attempt may have more luck
                    del self._taken[ticket]
            mine.set_exception(err)
        return mine.result()

    def is_taken(self, ticket: str) -> bool:
        """Whether some attempt has had it."""
        return ticket in self._taken

    def release(self) -> list[str]:
        """All that were taken go back: their step is over."""
        with self._lock:
            tickets = list(self._taken)
            self._taken.clear()
        self._parts.release(tickets)
        return tickets


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """What a node needs of a step."""

    numbers: Sequence[int]
    """Of its pipeline's microbatches."""
    routes: Routes
    samples: Mapping[str, list[int]]
    """By ticket."""


class NodeLoader(PortionLoader):
    """Steps with their whole plans. Of the nodes one commits each, for all."""

    def __init__(
        self,
        endpoint: str,
        *,
        job: str,
        number: int,
        device: torch.device,
        transports: Sequence[str] = TRANSPORTS,
        tls_ca: Path | None = None,
    ) -> None:
        """`number`: tells the sessions of nodes apart."""
        self._layout: Layout | None = None
        self._columns: Sequence[str] = ()  # that are fetched
        self._needed: dict[int, Needed] = {}  # by step
        super().__init__(
            endpoint,
            job=job,
            rank=number,
            num_ranks=1,
            device=device,
            transports=transports,
            tls_ca=tls_ca,
            columns=None,
            together=True,
        )
        self._kept = KeptParts(self._parts)

    def assign(self, layout: Layout, next_step: int) -> None:
        """From `next_step` on the node has this share; what it fetched for another one, and does not need, goes back."""
        with self._changed:
            self._layout = layout
            for step in [step for step in self._plans if step < next_step]:
                self._forget(step)
            if next_step != self._next_step:
                self._kept.release()
            before = self._tickets()
            columns = columns_of(layout.topology, layout.place)
            if columns != self._columns:
                self._kept.release()
                self._parts.drop(before)
                self._parts.set_columns(columns)
                self._columns, before = columns, set()
            self._next_step = self._committed = self._queued_step = next_step
            self._needed = {}
            while (plan := self._plans.get(self._queued_step)) is not None:
                self._tickets_of(plan)
                self._queued_step += 1
            self._parts.drop([ticket for ticket in before - self._tickets() if not self._kept.is_taken(ticket)])
            for needed in self._needed.values():
                self._parts.queue([t for t in needed.samples if t not in before and not self._kept.is_taken(t)])

    def unassign(self) -> None:
        """The node has no share."""
        with self._changed:
            self._layout = None
            self._kept.release()
            self._parts.drop(self._tickets())
            self._needed = {}

    def next_plan(self, check: Callable[[], None]) -> sessions_pb2.RankPlan | None:
        """Of the next step; None at the job's end. Calls `check`, which may raise, while it waits."""
        with self._changed:
            while self._next_step not in self._plans:
                check()
                if self._error is not None:
                    raise self._error
                if self._ended:
                    raise JobFailedError(self._ended)
                if self._ended is not None:
                    return None
                self._changed.wait(timeout=_CHECK_S)
            return self._plans[self._next_step]

    @property
    def is_over(self) -> bool:
        """Whether all of the job's steps are committed."""
        return self._ended == ""

    def begin(self, plan: sessions_pb2.RankPlan) -> tuple[Step, Sequence[int], StepFeed]:
        """An attempt at a step, with the numbers of the microbatches that the node's pipeline is to do."""
        assert self._layout is not None, "the node has a share"
        with self._changed:
            tickets = self._tickets_of(plan)
            needed = self._needed[plan.step]
        step = Step(index=plan.step, num_samples=plan.num_samples, _microbatches=iter(()), _tickets=tickets)
        feed = StepFeed(needed.routes, self._layout.place, needed.samples, self._kept, self._portions)
        feed.announce()
        return step, needed.numbers, feed

    def finish(self, step: Step) -> None:
        """The step is applied here. Its plan stays: where the others have not seen the outcome, all repeat it."""
        self._kept.release()
        with self._changed:
            self._committed = self._next_step = step.index + 1
            self._needed.pop(step.index, None)
            self._forget(step.index - 1)

    def commit_for_all(
        self,
        step: int,
        rejected: Sequence[Rejected],
        *,
        loss: float = math.nan,
        step_s: float = 0.0,
        data_wait_s: float = 0.0,
    ) -> None:
        """All nodes have applied the step. Saying it again is harmless."""
        self._client.commit(step, rejected, loss, step_s, data_wait_s)

    def _forget(self, step: int) -> None:
        self._needed.pop(step, None)
        plan = self._plans.pop(step, None)
        if plan is not None:
            self._parts.forget([ticket for microbatch in plan.microbatches for ticket in microbatch.tickets])

    def _queue_parts(self) -> None:
        if self._layout is None:  # for a share that begins later, the window's plans are enough
            for step in [step for step in self._plans if step <= max(self._plans) - self.spec.window]:
                self._forget(step)
        while self._layout is not None and (plan := self._plans.get(self._queued_step)) is not None:
            self._parts.queue(self._tickets_of(plan))
            self._queued_step += 1

    def _tickets_of(self, plan: sessions_pb2.RankPlan) -> list[str]:
        """Those that the node's share needs, in the order in which it does."""
        assert self._layout is not None, "the node has a share"
        if plan.step not in self._needed:
            whole = codec.plan_value(plan.whole)
            seconds = [one.seconds for one in sorted(plan.microbatches, key=lambda one: (one.replica, one.index))]
            numbers, alone = self._layout.assigned(plan.step, whole, seconds)
            routes = Routes(alone, dict.fromkeys(self._layout.topology.units, 1))
            samples = tickets_of(plan, routes, self._layout.place)
            self._needed[plan.step] = Needed(numbers=numbers, routes=routes, samples=samples)
        return list(self._needed[plan.step].samples)

    def _tickets(self) -> set[str]:
        return {ticket for needed in self._needed.values() for ticket in needed.samples}
