"""The loader that holds a rank's session with the reorder service: yields steps of packed microbatches, and can be checkpointed.

A thread of its own listens for plans and for the locations of parts; `headrace.trainer.loading.fetch` fetches the parts ahead.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

import pyarrow as pa
import torch

from headrace.errors import ConflictError, JobFailedError, NotFoundError, UnavailableError
from headrace.jobs_client import JobsClient
from headrace.observability import metrics, tracing
from headrace.observability.logs import pairs
from headrace.quarantine import Rejected
from headrace.spec import JobSpec
from headrace.trainer.loading.buffers import BufferPool, PinnedMemory
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.columns import is_view
from headrace.trainer.loading.consumers import Consumers
from headrace.trainer.loading.data_parallel import check_ranks
from headrace.trainer.loading.fetch import PartFetcher
from headrace.trainer.loading.loader_state import LoaderState
from headrace.trainer.loading.pack_ahead import PackAhead
from headrace.trainer.loading.packs import collate_packs
from headrace.trainer.loading.session import AWAY_TIMEOUT_S, SessionClient
from headrace.trainer.loading.statistics import LoaderStatistics
from headrace.trainer.loading.step_loader import StepLoader
from headrace.trainer.loading.steps import Microbatch, Step, sources_in
from headrace.v1 import sessions_pb2

log = logging.getLogger(__name__)

_CONSUMERS = Consumers()


class SessionLoader(StepLoader):
    """The loader of one rank, with its own session."""

    def __init__(
        self,
        endpoint: str,
        *,
        job: str,
        rank: int,
        num_ranks: int,
        prefetch_parts: int,
        prefetch_bytes: int,
        threads: int,
        transports: Sequence[str],
        columns: Sequence[str] | None,
        hedge_s: float,
        unit: str = "",
        replicas: Sequence[int] = (),
        shared_commit: bool = False,
        equal_microbatches: bool = False,
        token: str | None = None,
        tls: str | Path | None = None,
        of_job: Callable[[str], SessionLoader] | None = None,
        buffers: BufferPool | None = None,
    ) -> None:
        """`columns`: those to fetch; None: all. `of_job`: returns a loader with the same options of another job; None: it has no
        evaluations. `buffers`: what media are packed into; None: pinned memory where there is a GPU, else this loader's own.
        Others that `headrace.trainer.connect` lacks: see SessionClient."""
        super().__init__(job)
        self._of_job, self._token, self._tls = of_job, token, tls
        self._rank, self._num_ranks, self._equal_microbatches = rank, num_ranks, equal_microbatches
        self._counts_ranks = not replicas and not shared_commit  # processes of a pipeline name their replicas instead
        self._client = SessionClient(
            endpoint, job, rank, num_ranks, replicas, unit=unit, shared_commit=shared_commit, token=token, tls=tls
        )
        self._parts = PartFetcher(
            self._client.report_lost,
            max_parts=prefetch_parts,
            max_bytes=prefetch_bytes,
            threads=threads,
            transports=transports,
            columns=columns,
            token=token,
            tls=tls,
            hedge_s=hedge_s,
            on_delivered=self._on_part_arrived,
        )
        self._packing = PackAhead(self._pack, lambda message: self._parts.have_arrived(message.tickets))
        self._buffers = buffers or BufferPool(prefetch_bytes, pinned=PinnedMemory() if torch.cuda.is_available() else None)
        self._data_wait_s = 0.0
        self._plans: dict[int, sessions_pb2.RankPlan] = {}
        self._changed = threading.Condition()
        self._queued_step = 0
        self._ended: str | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None  # listens for plans; None: the session is not open
        self._left = threading.Event()  # set: that thread is to end
        self._next_step = self._committed = 0
        self._passed_on = 0  # number of steps whose commit was begun
        self._enter()

    # -- session ------------------------------------------------------------------------------------------------------

    def _open(self, states: Sequence[LoaderState]) -> StepLoader:
        if self._thread is None:
            if self._counts_ranks:
                check_ranks(self._num_ranks)
            try:
                opened = self._client.open(states)
            except BaseException:
                _CONSUMERS.leave(self)  # the job does not have this rank
                raise
            self._enter()
            self.spec, self.vocabulary, self.generation = opened.spec, opened.vocabulary, opened.generation
            self._state, self._next_step = opened.state, opened.next_step
            self._committed = self._queued_step = self._next_step
            self._left = threading.Event()
            self._thread = threading.Thread(target=self._listen, args=(self._left,), name="plans", daemon=True)
            self._thread.start()
        return self

    def _enter(self) -> None:
        _CONSUMERS.enter(self, self._client.endpoint, self._client.job, self._rank)

    def close(self) -> None:
        self._left.set()
        _CONSUMERS.leave(self)
        self._packing.close()
        self._parts.close()
        self._client.close()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    @property
    def next_step(self) -> int:
        self.open()
        return max(self._next_step, self._state.step or 0)

    def has_next(self) -> bool:
        self.open()
        return self._next_plan() is not None

    def _loader_of(self, spec: JobSpec) -> Self:
        assert self._of_job is not None, "this kind of loader evaluates"
        with JobsClient(self._client.endpoint, self._token, self._tls) as jobs:
            jobs.submit(spec)
        loader = self._of_job(spec.name)
        assert isinstance(loader, type(self))
        return loader

    def _end_session(self) -> None:
        if self._thread is not None:
            self._leave(self._thread)

    def _leave(self, listening: threading.Thread) -> None:
        """End the session, and forget its plans: the next use opens another one."""
        self._left.set()
        self._client.leave()
        listening.join()
        self._thread, self._ended, self._error = None, None, None  # another rank may have set the job back meanwhile
        self._drop_plans()
        self._parts.go_on()

    def _drop_plans(self) -> None:
        """Forget all plans received, and give back what was fetched for them."""
        for step, plan in sorted(self._plans.items()):
            if step < self._queued_step:
                self._parts.drop(self._tickets_of(plan))
            self._parts.forget(_tickets(plan))
        self._plans.clear()

    def commit(self, step: Step, *, loss: float = math.nan) -> None:
        if not step.consumed:
            raise ConflictError(f"step {step.index} cannot be committed before all of its microbatches were consumed")
        step_s = time.perf_counter() - step.started_s
        self._parts.release(step._tickets)  # before the commit, so that preprocessors have the room for further parts
        metrics.DATA_WAIT_SECONDS.observe(step.data_wait_s)
        with tracing.span("commit", step._trace, rank=self._rank):
            wait = _CONSUMERS.commit(self, step.index)
            self._client.commit(
                step.index, step.rejected, loss, step_s, step.data_wait_s, content=step.content, measured=step.work(), wait=wait
            )
        with self._changed:
            self._committed = step.index + 1
            plan = self._plans.pop(step.index, None)
        if self._committed > (self._state.step or 0):
            self._state = replace(self._state, step=self._committed, content=step.content)
        if plan is not None:
            self._parts.forget(_tickets(plan))

    # -- steps --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        self.open()
        self._catch_up()
        while True:
            started_s = time.perf_counter()
            plan = self._next_plan()
            if plan is None:
                if not self._handed_out:
                    known = pairs(job=self._client.job, committed=self._committed)
                    log.warning("no step is left of the job, which `headrace job reset NAME --step 0` begins anew %s", known)
                return
            step = Step.of(plan, self._tickets_of(plan), equal_microbatches=self._equal_microbatches)
            step.started_s = started_s
            self._waited(step, started_s)
            step._microbatches = self._microbatches(plan, step)
            self._handed_out = True
            _CONSUMERS.take(self)
            self._next_step = plan.step + 1  # before the yield, so that a new loop over the loader goes on after this step
            yield step

    def _catch_up(self) -> None:
        """Commit again the steps that the loaded state includes but the store has lost.

        Their parts are fetched only for the samples that turned out to be damaged.
        """
        while self._next_step < (self._state.step or 0) and (plan := self._next_plan()) is not None:
            tickets, rejected = self._tickets_of(plan), list[Rejected]()
            for ticket in tickets:
                rejected += self._parts.take(ticket).rejected
                self._parts.release([ticket])
            again = Step.of(plan, tickets)
            again.rejected, again.consumed = rejected, True
            self.commit(again)
            self._next_step = plan.step + 1
            log.warning("committed again, as the store had lost it job=%s step=%d", self._client.job, plan.step)

    def _next_plan(self) -> sessions_pb2.RankPlan | None:
        with self._changed:
            while self._next_step not in self._plans:
                if self._error is not None:
                    raise self._error
                if self._ended is not None:
                    if self._ended:
                        raise JobFailedError(self._ended)
                    return None
                if self._next_step - max(self._committed, self._passed_on) >= self.spec.window:
                    raise ConflictError(
                        f"{self.spec.window} steps are not committed since step {self._committed}, "
                        "and no further one is planned: call loader.commit(step) after each optimizer step"
                    )
                self._changed.wait(timeout=1.0)
            return self._plans[self._next_step]

    def _microbatches(self, plan: sessions_pb2.RankPlan, step: Step) -> Iterator[Microbatch]:
        for number, message in enumerate(plan.microbatches, 1):
            began_s = time.perf_counter()
            data, rejected = self._packing.take(message)
            step.rejected.extend(rejected)
            self._waited(step, began_s)
            step.consumed = number == step.num_microbatches
            self._announce(plan, number)
            sources = sources_in(message, data.sample_ids, len(self.spec.sources))
            yield Microbatch(replica=message.replica, index=message.index, data=data, _sources=sources)
        for number in range(len(plan.microbatches) + 1, step.num_microbatches + 1):
            step.consumed = number == step.num_microbatches
            replica = plan.microbatches[-1].replica
            yield Microbatch(replica=replica, index=number - 1, data=self._collate([], []), is_filler=True)

    def _on_part_arrived(self) -> None:
        """Pack the next microbatch, if the part that arrived was the last one missing."""
        self._packing.start_if_ready()

    def _announce(self, plan: sessions_pb2.RankPlan, number: int) -> None:
        """Announce the next microbatch for packing, after `number` of them of the plan were taken.

        Behind a plan's last microbatch it is the first one of the next step, if that is planned.
        """
        following = self._plans.get(plan.step + 1) if number == len(plan.microbatches) else plan
        if following is not None and following.microbatches:
            self._packing.announce(following.microbatches[number % len(plan.microbatches)])

    def _pack(self, message: sessions_pb2.RankMicrobatch) -> tuple[PackedMicrobatch, list[Rejected]]:
        """Pack the parts of a microbatch, and return it with its damaged samples. Parts that were copied are released at once."""
        batches: list[pa.RecordBatch] = []
        rejected: list[Rejected] = []
        for ticket in message.tickets:
            part = self._parts.take(ticket)
            batches += [batch for batch in part.batches if batch.num_rows]
            rejected.extend(part.rejected)
        data = self._collate(batches, [pack.sample_ids for pack in message.packs])
        if not is_view(batches, self._buffers):
            self._parts.release(list(message.tickets))
        return data, rejected

    def _collate(self, batches: Sequence[pa.RecordBatch], packs: Sequence[Collection[int]]) -> PackedMicrobatch:
        """Pack batches into a microbatch. packs: the sample ids of each pack in the order of the rows; empty without packs."""
        return collate_packs(batches, packs, self.spec, self.vocabulary, self._buffers)

    def _waited(self, step: Step, since_s: float) -> None:
        waited_s = time.perf_counter() - since_s
        step.data_wait_s += waited_s
        tracing.ended("wait", step._trace, since_s, rank=self._rank)
        self._data_wait_s += waited_s

    def statistics(self) -> LoaderStatistics:
        return LoaderStatistics(
            **asdict(self._parts.statistics()), data_wait_s=self._data_wait_s, idle_buffer_bytes=self._buffers.idle_bytes
        )

    # -- listening ----------------------------------------------------------------------------------------------------

    def _listen(self, left: threading.Event) -> None:
        try:
            while not left.is_set() and self._ended is None:
                session = self._client.session
                try:
                    for event in self._client.events():
                        self._hear(event)
                except (NotFoundError, UnavailableError) as err:
                    if left.is_set():
                        return
                    log.warning("plans interrupted (%s); opening the session again", err)
                    self._client.reopen(session, AWAY_TIMEOUT_S)
        except Exception as err:  # of any kind: the consumer raises it instead of waiting for ever
            if not left.is_set():
                with self._changed:
                    self._error = err
                    self._changed.notify_all()
                self._parts.fail(err)
        finally:
            if not left.is_set():  # otherwise it is closed, or opens again
                _CONSUMERS.leave(self)

    def _hear(self, event: sessions_pb2.PlanEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "location":
            location = event.location
            self._parts.set_location(location.ticket, location.lease, location.endpoint, location.left_out)
        elif kind == "plan":
            with self._changed:
                if event.plan.step >= self._committed:
                    self._plans[event.plan.step] = event.plan
                self._queue_parts()
                self._changed.notify_all()
        elif kind == "ended":
            with self._changed:
                self._ended = event.ended.message
                self._changed.notify_all()
            if event.ended.message:
                self._parts.fail(JobFailedError(event.ended.message))

    def _queue_parts(self) -> None:
        """Queue the parts of received plans in the order of steps, although plans may arrive in another order."""
        while (plan := self._plans.get(self._queued_step)) is not None:
            self._parts.queue(self._tickets_of(plan))
            self._queued_step += 1

    def _tickets_of(self, plan: sessions_pb2.RankPlan) -> list[str]:
        """Return the tickets of the parts that this rank consumes, in order of use."""
        return _tickets(plan)


def _tickets(plan: sessions_pb2.RankPlan) -> list[str]:
    return [ticket for microbatch in plan.microbatches for ticket in microbatch.tickets]
