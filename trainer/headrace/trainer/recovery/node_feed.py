"""The step loader of a recoverable job's node: it gets whole plans, and keeps fetched parts when the node's share changes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace import message_codec
from headrace.errors import JobFailedError
from headrace.measured import MeasuredWork
from headrace.quarantine import Rejected
from headrace.trainer.loading.fetch import PartFetcher
from headrace.trainer.loading.part_client import FetchedPart
from headrace.trainer.loading.steps import Step
from headrace.trainer.pipeline.cargo import Prepare
from headrace.trainer.pipeline.feed import PortionLoader, StepFeed, columns_of, packs_of, tickets_of
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.recovery.layout import Layout
from headrace.transport.base import TRANSPORTS
from headrace.v1 import sessions_pb2

_CHECK_S = 0.02  # how often a node that waits for a plan checks for a newer snapshot


class KeptParts:
    """Keeps the parts that were taken until their step is over, so that a new attempt at the step has them. Thread-safe."""

    def __init__(self, parts: PartFetcher) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._taken: dict[str, Future[FetchedPart]] = {}

    def have_arrived(self, tickets: Sequence[str]) -> bool:
        """Whether these parts have come or were taken before, so that `take` need not wait for the network."""
        return self._parts.have_arrived([ticket for ticket in tickets if ticket not in self._taken])

    def take(self, ticket: str) -> FetchedPart:
        """Wait for a part and return it (`PartFetcher.take`), or return it again if an earlier attempt took it."""
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
                if self._taken.get(ticket) is mine:  # so that another attempt can try again
                    del self._taken[ticket]
            mine.set_exception(err)
        return mine.result()

    def is_taken(self, ticket: str) -> bool:
        """Whether some attempt at the step has taken the part."""
        return ticket in self._taken

    def release(self) -> list[str]:
        """Release all taken parts, as their step is over, and return their tickets."""
        with self._lock:
            tickets = list(self._taken)
            self._taken.clear()
        self._parts.release(tickets)
        return tickets


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """A node's share of one step: microbatches, routes and parts."""

    numbers: Sequence[int]
    """Numbers of the microbatches that the node's pipeline is to do."""
    routes: Routes
    samples: Mapping[str, list[int]]
    """Samples of each part that the node needs, by ticket."""


class NodeLoader(PortionLoader):
    """A step loader for one node of a recoverable job, which gets whole plans. One of the nodes commits each step for all."""

    def __init__(
        self,
        endpoint: str,
        *,
        job: str,
        number: int,
        device: torch.device,
        transports: Sequence[str] = TRANSPORTS,
    ) -> None:
        """`number`: the node's session number, different for each node of the job. `device`: where packed portions are copied to.
        `transports`: as in `headrace.trainer.connect`.
        """
        self.of_job: Callable[[str], NodeLoader] = lambda job: NodeLoader(
            endpoint, job=job, number=number, device=device, transports=transports
        )
        """Returns such a loader of another job."""
        self._layout: Layout | None = None
        self._columns: Sequence[str] = ()  # columns that are fetched
        self._needed: dict[int, Needed] = {}  # by step
        self._early: dict[int, set[str]] = {}  # by step: parts queued for a plan that was made for former pipelines
        super().__init__(
            endpoint,
            job=job,
            rank=number,
            num_ranks=1,
            device=device,
            transports=transports,
            columns=None,
            shared_commit=True,
        )
        self._kept = KeptParts(self._parts)

    def assign(self, layout: Layout, next_step: int) -> None:
        """Give the node a share of all steps from `next_step` on.

        What was fetched for a step before is kept, or dropped, once the plan for this layout's pipelines says what is needed.
        """
        with self._changed:
            self._layout = layout
            for step in [step for step in self._plans if step < next_step]:
                self._forget(step)
            if next_step != self._next_step:
                self._kept.release()
            self._early |= {step: set(needed.samples) for step, needed in self._needed.items()}
            columns = columns_of(layout.topology, layout.place)
            if columns != self._columns:
                self._kept.release()
                self._drop_early()
                self._parts.set_columns(columns)
                self._columns = columns
            self._next_step = self._committed = self._queued_step = next_step
            self._needed = {}
            self._queue_parts()

    def unassign(self) -> None:
        """Take the node's share away, and drop the parts fetched for it."""
        with self._changed:
            self._layout = None
            self._kept.release()
            self._early |= {step: set(needed.samples) for step, needed in self._needed.items()}
            self._needed = {}
            self._drop_early()

    def next_plan(self, check: Callable[[], None]) -> sessions_pb2.RankPlan | None:
        """Wait for the plan of the next step and return it; None at the job's end. Raises JobFailedError if the job failed.

        check: called while it waits; may raise to end the wait.
        """
        with self._changed:
            while (plan := self._plan_of(self._next_step)) is None:
                check()
                if self._error is not None:
                    raise self._error
                if self._ended:
                    raise JobFailedError(self._ended)
                if self._ended is not None:
                    return None
                self._changed.wait(timeout=_CHECK_S)
            return plan

    @property
    def is_over(self) -> bool:
        """Whether all of the job's steps are committed."""
        return self._ended == ""

    def begin(self, plan: sessions_pb2.RankPlan, prepare: Prepare) -> tuple[Step, Sequence[int], StepFeed]:
        """Begin an attempt at a step.

        Return the step, the numbers of the microbatches that the node's pipeline is to do, and the feed of their data.
        `prepare`: of this node's executor, makes the cargo of a portion.
        """
        assert self._layout is not None, "the node has a share"
        with self._changed:
            tickets = self._tickets_of(plan)
            needed = self._needed[plan.step]
        step = Step.of(plan, tickets)
        feed = StepFeed(needed.routes, self._layout.place, needed.samples, packs_of(plan), self._kept, self._portions, prepare)
        feed.announce()
        return step, needed.numbers, feed

    def finish(self, step: Step) -> None:
        """Note that this node has applied a step. The plan is kept: if others have not seen the outcome, all repeat the step."""
        self._kept.release()
        with self._changed:
            self._committed = self._next_step = step.index + 1
            self._state = replace(self._state, step=self._committed, content=step.content)
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
        measured: Sequence[MeasuredWork] = (),
    ) -> None:
        """Commit a step for all nodes, once all have applied it. Committing it again is harmless."""
        self._client.commit(step, rejected, loss, step_s, data_wait_s, measured=measured)

    def state_dict_at(self, step: int) -> dict[str, Any]:
        """Return the state of a model that has applied the steps before `step`."""
        state = self.state_dict()
        return state if state["step"] == step else state | {"step": step, "content": 0}

    def _forget(self, step: int) -> None:
        self._needed.pop(step, None)
        self._parts.drop([ticket for ticket in self._early.pop(step, ()) if not self._kept.is_taken(ticket)])
        plan = self._plans.pop(step, None)
        if plan is not None:
            self._parts.forget([ticket for microbatch in plan.microbatches for ticket in microbatch.tickets])

    def _hear(self, event: sessions_pb2.PlanEvent) -> None:
        if event.WhichOneof("event") == "plan":
            with self._changed:
                if is_outdated(event.plan, self._plans.get(event.plan.step)):
                    return
        super()._hear(event)

    def _plan_of(self, step: int) -> sessions_pb2.RankPlan | None:
        """Return the plan of a step if it has come, made for the pipelines that are to follow it."""
        plan = self._plans.get(step)
        return (
            plan if self._layout is not None and plan is not None and plan.formation == self._layout.formation_of(step) else None
        )

    def _queue_parts(self) -> None:
        if self._layout is None:  # a share given later needs no plans older than the window
            for step in [step for step in self._plans if step <= max(self._plans) - self.spec.window]:
                self._forget(step)
        while (plan := self._plan_of(self._queued_step)) is not None:
            tickets, early = self._tickets_of(plan), self._early.pop(plan.step, set())
            self._parts.drop([ticket for ticket in early.difference(tickets) if not self._kept.is_taken(ticket)])
            self._parts.queue([ticket for ticket in tickets if ticket not in early and not self._kept.is_taken(ticket)])
            self._queued_step += 1

    def _drop_early(self) -> None:
        """Drop the parts that were queued for plans that hold no longer."""
        self._parts.drop([ticket for of_step in self._early.values() for ticket in of_step if not self._kept.is_taken(ticket)])
        self._early = {}

    def _tickets_of(self, plan: sessions_pb2.RankPlan) -> list[str]:
        """Return the tickets of the parts that the node's share of a plan needs, in the order in which it needs them."""
        assert self._layout is not None, "the node has a share"
        if plan.step not in self._needed:
            numbers, alone = self._layout.assigned(plan.step, message_codec.plan_value(plan.whole), plan.seconds)
            routes = Routes(alone, dict.fromkeys(self._layout.topology.units, 1))
            samples = tickets_of(plan, routes, self._layout.place)
            self._needed[plan.step] = Needed(numbers=numbers, routes=routes, samples=samples)
        return list(self._needed[plan.step].samples)


def is_outdated(told: sessions_pb2.RankPlan, held: sessions_pb2.RankPlan | None) -> bool:
    """Return whether the plan that a node is told was made for earlier pipelines than the one of the same step that it holds.

    A service that has just begun to lead may tell such a plan, as it does not know of the pipelines yet. A plan for later
    pipelines may come before the node has taken its place in them, and is not told again.
    """
    return held is not None and told.formation < held.formation
