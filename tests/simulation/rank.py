"""A trainer rank: the real SessionClient, and a light loader around it that does what StepLoader and PartFetcher do.

It fetches the parts of a step from where they are, reports those that it cannot have, trains for a while, applies the step to its
model, commits it, and saves a checkpoint. The model is the record of what it has learnt: step -> ids of the samples.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc

from headrace.errors import JobFailedError, NotFoundError, UnavailableError
from headrace.quarantine import Reason, Rejected
from headrace.trainer.loading.loader_state import LoaderState
from headrace.trainer.loading.session import AWAY_TIMEOUT_S, RETRY_S, SessionClient
from headrace.v1 import sessions_pb2
from tests.simulation.fibers import in_fiber, wait_for
from tests.simulation.network import Network
from tests.simulation.simulated_call import RpcError
from tests.simulation.simulated_channel import SimulatedChannel
from tests.simulation.simulated_preprocessor import FETCH
from tests.simulation.virtual_loop import Process

ORDER_S = 0.5  # a preprocessor may get the order to decode a part so long after the part's location is known here
HEDGE_S = 5.0
ORDER_RETRY_S = 0.05

Model = dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a rank has saved: the loader's state, and the model."""

    state: LoaderState
    model: Model


class Rank:
    """One process of training. `run` it in a fiber of its process; `model` is what it has applied."""

    def __init__(
        self,
        process: Process,
        network: Network,
        endpoint: str,
        job: str,
        rank: int,
        num_ranks: int,
        *,
        step_s: Callable[[], float],
        save: Callable[[Checkpoint], None],
        on_fetched: Callable[[int, tuple[int, ...]], None],
    ) -> None:
        """`step_s`: draws how long a step takes. `save`: saves a checkpoint.
        `on_fetched(step, ids)`: it has all samples of a step."""
        self._process, self._network = process, network
        self._client = SessionClient(endpoint, job, rank, num_ranks)
        self._step_s, self._save, self._on_fetched = step_s, save, on_fetched
        self._channels: dict[str, SimulatedChannel] = {}
        self._plans: dict[int, sessions_pb2.RankPlan] = {}
        self._locations: dict[str, tuple[str, str, float]] = {}  # ticket -> lease, endpoint, when it was told
        self._ended: str | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._has_left = False
        self._committed = 0

    def run(self, checkpoints: Mapping[int | None, Checkpoint], on_model: Callable[[Model], None]) -> None:
        """Train to the job's end from the newest of these checkpoints that all ranks have. `on_model`: told which model it is."""
        opened = self._client.open([checkpoint.state for checkpoint in checkpoints.values()])
        resume_step, next_step = opened.state.step or 0, opened.next_step
        model = dict(checkpoints[resume_step].model) if resume_step in checkpoints else {}
        on_model(model)
        self._committed = next_step
        self._process.spawn(in_fiber(self._listen))
        step = next_step
        while (plan := self._next_plan(step)) is not None:
            ids, rejected = self._fetch(plan)
            self._on_fetched(step, ids)
            if step >= resume_step:
                wait_for(asyncio.sleep(self._step_s()))
                model[step] = ids
            self._client.commit(step, rejected, float(step), 1.0, 0.1, content=plan.content, wait=True)
            self._committed = step = step + 1
            self._plans.pop(step - 1, None)
            if step > resume_step:
                state = replace(opened.state, step=step, content=plan.content)
                self._save(Checkpoint(state=state, model=dict(model)))
        self._has_left = True
        self._client.close()

    def _next_plan(self, step: int) -> sessions_pb2.RankPlan | None:
        while step not in self._plans:
            if self._error is not None:
                raise self._error
            if self._ended is not None:
                if self._ended:
                    raise JobFailedError(self._ended)
                return None
            self._wait()
        return self._plans[step]

    def _wait(self, timeout_s: float = 1.0) -> None:
        async def waiting() -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()

        wait_for(waiting())

    # -- plans --------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Read plans and locations until the job ends, over one session after the other, as StepLoader does."""
        try:
            while self._ended is None:
                session = self._client.session
                try:
                    for event in self._client.events():
                        self._hear(event)
                except (NotFoundError, UnavailableError):
                    if self._has_left:
                        return
                    self._client.reopen(session, AWAY_TIMEOUT_S)
        except Exception as err:  # the loader raises it instead of waiting for ever
            self._error = err
        self._news.set()

    def _hear(self, event: sessions_pb2.PlanEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "plan" and event.plan.step >= self._committed:
            self._plans[event.plan.step] = event.plan
        elif kind == "location":
            location = event.location
            self._locations[location.ticket] = location.lease, location.endpoint, self._process.loop.time()
        elif kind == "ended":
            self._ended = event.ended.message
        self._news.set()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _fetch(self, plan: sessions_pb2.RankPlan) -> tuple[tuple[int, ...], list[Rejected]]:
        """All samples of a plan, and those that came as refused."""
        ids: list[int] = []
        rejected: list[Rejected] = []
        for ticket in [ticket for microbatch in plan.microbatches for ticket in microbatch.tickets]:
            part = self._part(ticket)
            ids += part["ids"]
            rejected += [
                Rejected(name=f"refused/{i}", reason=Reason.CORRUPT_MEDIA, detail="by its preprocessor", sample_id=i)
                for i in part["rejected"]
            ]
        return tuple(ids), rejected

    def _part(self, ticket: str) -> Any:
        failed_lease = ""
        while True:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise JobFailedError(self._ended)
            lease, endpoint, told_s = self._locations.get(ticket, ("", "", 0.0))
            if not lease or lease == failed_lease:
                self._wait()
                continue
            try:
                return json.loads(wait_for(self._channel(endpoint).ask(FETCH, ticket.encode(), HEDGE_S)))
            except RpcError as err:
                is_early = err.code() is grpc.StatusCode.NOT_FOUND and self._process.loop.time() < told_s + ORDER_S
            if is_early:
                wait_for(asyncio.sleep(ORDER_RETRY_S))
            elif self._locations[ticket][0] == lease:
                try:
                    self._client.report_lost(ticket, lease)
                    failed_lease = lease
                except (NotFoundError, UnavailableError):
                    wait_for(asyncio.sleep(RETRY_S))

    def _channel(self, endpoint: str) -> SimulatedChannel:
        if endpoint not in self._channels:
            self._channels[endpoint] = SimulatedChannel(self._network, endpoint)
        return self._channels[endpoint]
