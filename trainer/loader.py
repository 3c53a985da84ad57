"""The step loader: plans and parts, fetched ahead, as packed microbatches.

One thread listens for plans and for where parts are; a small pool fetches parts in the order in which they are consumed.
What lies ready is bounded in parts and in bytes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from headrace.errors import ConflictError, HeadraceError, JobFailedError, NotFoundError, UnavailableError
from headrace.quarantine import Rejected
from headrace.v1 import sessions_pb2
from trainer.client import RECONNECT_TIMEOUT_S, RETRY_S, Part, PartClient, SessionClient
from trainer.collate import PackedMicrobatch, collate

log = logging.getLogger(__name__)

STATE_VERSION = 1


@dataclass(slots=True, kw_only=True, eq=False)
class Microbatch:
    """One microbatch of one of this rank's replicas."""

    replica: int
    index: int
    data: PackedMicrobatch


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """One global batch as this rank sees it. Iterate over it once."""

    index: int
    num_samples: int
    """Of the whole global batch, over all ranks."""
    _microbatches: Iterator[Microbatch]
    rejected: list[Rejected] = field(default_factory=list)
    """Samples that turned out to be damaged when decoded; complete once the step is iterated."""
    consumed: bool = False
    """Whether its microbatches were all handed out."""
    data_wait_s: float = 0.0
    started_s: float = field(default_factory=time.perf_counter)

    def __iter__(self) -> Iterator[Microbatch]:
        return self._microbatches


class _Places:
    """Where parts are. `wait_for` blocks until a part has a place newer than the one that failed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str]] = {}
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def tell(self, ticket: str, lease: str, endpoint: str) -> None:
        with self._changed:
            self._known[ticket] = (lease, endpoint)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def forget(self, tickets: list[str]) -> None:
        with self._changed:
            for ticket in tickets:
                self._known.pop(ticket, None)

    def wait_for(self, ticket: str, failed_lease: str) -> tuple[str, str]:
        """(lease, endpoint)"""
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                place = self._known.get(ticket)
                if place is not None and place[0] != failed_lease:
                    return place
                self._changed.wait(timeout=1.0)


class StepLoader:
    """Iterate over it for the job's steps; `commit` each one. See `trainer.connect`."""

    def __init__(
        self, endpoint: str, *, job: str, rank: int, num_ranks: int, prefetch_parts: int, prefetch_bytes: int, threads: int
    ) -> None:
        self._client = SessionClient(endpoint, job, rank, num_ranks)
        self._parts = PartClient()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fetch")
        self._prefetch_parts = prefetch_parts
        self._prefetch_bytes = prefetch_bytes
        self._plans: dict[int, sessions_pb2.RankPlan] = {}
        self._places = _Places()
        self._changed = threading.Condition()
        self._unfetched: deque[str] = deque()
        self._queued_step = 0
        self._futures: dict[str, Future[Part]] = {}
        self._ready_bytes = 0
        self._ended: str | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._resume_step: int | None = None
        self._next_step = 0
        self._committed = 0

    # -- session ------------------------------------------------------------------------------------------------------

    def open(self) -> StepLoader:
        """Open the session, unless that is done. `spec` and `vocabulary` are known from then on."""
        if self._thread is None:
            self.spec, self.vocabulary, self._next_step, self.generation = self._client.open(self._resume_step)
            self._committed = self._queued_step = self._next_step
            self._thread = threading.Thread(target=self._listen, name="plans", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Stop fetching and end the session."""
        self._closed = True
        self._places.fail(UnavailableError("the loader is closed"))
        self._client.close()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._parts.close()

    def __enter__(self) -> StepLoader:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the job stands for this rank: goes into the trainer's checkpoint beside the model."""
        self.open()
        return {"version": STATE_VERSION, "job": self._client.job, "generation": self.generation, "step": self._committed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to the checkpoint's step: later commits are undone. Before the first step only.

        Raises ConflictError where the state is another job's or another version's.
        """
        if self._thread is not None:
            raise ConflictError("load_state_dict comes before the first step: make a new loader with trainer.connect")
        if state.get("version") != STATE_VERSION or state.get("job") != self._client.job:
            raise ConflictError(
                f"the state is of job {state.get('job')!r}, version {state.get('version')}; "
                f"this loader is of job {self._client.job!r}, version {STATE_VERSION}"
            )
        self._resume_step = int(state["step"])

    def commit(self, step: Step, *, loss: float = math.nan) -> None:
        """The step is applied. `loss`: of the whole step, if this rank knows it; for the ledger and for people.

        Raises ConflictError where some of the step's microbatches were not consumed.
        """
        if not step.consumed:
            raise ConflictError(f"step {step.index} cannot be committed before all of its microbatches were consumed")
        step_s = time.perf_counter() - step.started_s
        self._client.commit(step.index, step.rejected, loss, step_s, step.data_wait_s)
        with self._changed:
            self._committed = step.index + 1
            plan = self._plans.pop(step.index, None)
        if plan is not None:
            self._places.forget(_tickets(plan))

    # -- steps --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        self.open()
        while True:
            started_s = time.perf_counter()
            plan = self._next_plan()
            if plan is None:
                return
            step = Step(
                index=plan.step,
                num_samples=plan.num_samples,
                _microbatches=iter(()),
                started_s=started_s,
            )
            step.data_wait_s = time.perf_counter() - started_s
            step._microbatches = self._microbatches(plan, step)
            self._next_step = plan.step + 1  # before the step is handed out: a new loop over the loader goes on behind it
            yield step

    def _next_plan(self) -> sessions_pb2.RankPlan | None:
        with self._changed:
            while self._next_step not in self._plans:
                if self._error is not None:
                    raise self._error
                if self._ended is not None:
                    if self._ended:
                        raise JobFailedError(self._ended)
                    return None
                if self._next_step - self._committed >= self.spec.window:
                    raise ConflictError(
                        f"{self.spec.window} steps are not committed since step {self._committed}, "
                        "and no further one is planned: call loader.commit(step) after each optimizer step"
                    )
                self._changed.wait(timeout=1.0)
            return self._plans[self._next_step]

    def _microbatches(self, plan: sessions_pb2.RankPlan, step: Step) -> Iterator[Microbatch]:
        for number, message in enumerate(plan.microbatches, 1):
            began_s = time.perf_counter()
            parts = []
            for ticket in message.tickets:
                self._fetch_ahead(ticket)
                part = self._futures.pop(ticket).result()
                parts.append(part)
                with self._changed:
                    self._ready_bytes -= part.num_bytes
                step.rejected.extend(part.rejected)
            self._fetch_ahead()
            data = collate([part.batch for part in parts])
            step.data_wait_s += time.perf_counter() - began_s
            step.consumed = number == len(plan.microbatches)
            yield Microbatch(replica=message.replica, index=message.index, data=data)

    # -- fetching -----------------------------------------------------------------------------------------------------

    def _fetch_ahead(self, needed: str | None = None) -> None:
        """Start fetching in the order of consumption: `needed` in any case, then as far as the bounds allow.

        Called by the consumer only, who alone touches `_futures` and `_unfetched`.
        """
        with self._changed:
            while (plan := self._plans.get(self._queued_step)) is not None:
                self._unfetched.extend(_tickets(plan))
                self._queued_step += 1
            ready_bytes = self._ready_bytes
        while self._unfetched:
            bounded = len(self._futures) >= self._prefetch_parts or ready_bytes >= self._prefetch_bytes
            if bounded and (needed is None or needed in self._futures):
                return
            ticket = self._unfetched.popleft()
            self._futures[ticket] = self._pool.submit(self._fetch, ticket)

    def _fetch(self, ticket: str) -> Part:
        """Fetch a part from wherever it is, until one preprocessor delivers it."""
        failed_lease = ""
        while True:
            lease, endpoint = self._places.wait_for(ticket, failed_lease)
            try:
                part = self._parts.fetch(endpoint, ticket)
            except (NotFoundError, UnavailableError) as err:
                if self._closed:
                    raise
                log.warning("fetch failed ticket=%s endpoint=%s: %s", ticket, endpoint, err)
                if self._report_lost(ticket, lease):
                    failed_lease = lease
                else:  # nobody moves the part: the same place may be told again
                    time.sleep(RETRY_S)
                continue
            with self._changed:
                self._ready_bytes += part.num_bytes
            return part

    def _report_lost(self, ticket: str, lease: str) -> bool:
        """Whether the service knows of it, so that a newer place follows."""
        try:
            self._client.report_lost(ticket, lease)
        except (NotFoundError, UnavailableError) as err:
            log.warning("report of a lost part failed ticket=%s: %s", ticket, err)
            return False
        return True

    # -- listening ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while not self._closed and self._ended is None:
                session = self._client.session
                try:
                    for event in self._client.events():
                        self._hear(event)
                except (NotFoundError, UnavailableError) as err:
                    if self._closed:
                        return
                    log.warning("plans interrupted (%s); opening the session again", err)
                    self._client.reopen(session, RECONNECT_TIMEOUT_S)
        except HeadraceError as err:
            if not self._closed:
                with self._changed:
                    self._error = err
                    self._changed.notify_all()
                self._places.fail(err)

    def _hear(self, event: sessions_pb2.PlanEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "location":
            place = event.location
            self._places.tell(place.ticket, place.lease, place.endpoint)
            return
        with self._changed:
            if kind == "plan":
                if event.plan.step >= self._committed:
                    self._plans[event.plan.step] = event.plan
            else:
                self._ended = event.ended.message
            self._changed.notify_all()
        if kind == "ended" and event.ended.message:
            self._places.fail(JobFailedError(event.ended.message))


def _tickets(plan: sessions_pb2.RankPlan) -> list[str]:
    return [ticket for microbatch in plan.microbatches for ticket in microbatch.tickets]


def connect(
    endpoint: str,
    *,
    job: str,
    rank: int = 0,
    num_ranks: int = 1,
    prefetch_parts: int = 8,
    prefetch_bytes: int = 256 << 20,
    threads: int = 4,
) -> StepLoader:
    """A loader of the steps of `job` for one rank.

    Rank r of n gets the microbatches of replicas r, r + n, r + 2n, ... Use it from any training loop:

        with trainer.connect("127.0.0.1:7070", job="demo") as loader:
            for step in loader:
                for microbatch in step:
                    ...             # forward and backward on microbatch.data, gradients summed
                ...                 # optimizer step
                loader.commit(step, loss=loss)

    Up to `prefetch_parts` parts, and no more than about `prefetch_bytes`, lie ready ahead of the consumer. Raises EndpointError,
    NotFoundError or ConflictError when it is opened, at `with` or at the first step.
    """
    return StepLoader(
        endpoint,
        job=job,
        rank=rank,
        num_ranks=num_ranks,
        prefetch_parts=prefetch_parts,
        prefetch_bytes=prefetch_bytes,
        threads=threads,
    )
