"""A job's orders to the fleet. What every preprocessor has failed at is tried again after pauses, before the job gives up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import JobFailedError
from headrace.v1.fleet_pb2 import FleetOrder
from reorder_service import messages
from reorder_service.fleet import Fleet, Work
from reorder_service.step import Part

RETRY_PAUSES_S = (0.5, 1.0, 2.0, 4.0)  # a file system that went away may come back

# Kinds of a step's work in the order in which a starved fleet does them. Decoding an early step outranks probing a late one.
PROBE, DECODE = 0, 1


class Orders:
    """For one job, in one event loop."""

    def __init__(self, job: str, share: float, fleet: Fleet) -> None:
        """`share`: of the fleet, beside other jobs'."""
        self._job = job
        self._share = share
        self._fleet = fleet

    async def ask(
        self, priority: tuple[int, ...], order: Callable[[str], FleetOrder], shards: Mapping[int, int] | None = None
    ) -> Any:
        """Have any preprocessor do something; its report. Raises JobFailedError where none can, after some pauses.

        `shards`: how many samples of which the order reads.
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
        """The same, without pauses: each preprocessor that is there is asked once."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(result: Any) -> None:
            if not future.done():
                future.set_result(result)

        def failed(error: str) -> None:
            if not future.done():
                future.set_exception(JobFailedError(error))

        work = Work(
            job=self._job,
            share=self._share,
            priority=priority,
            order=order,
            on_done=done,
            on_failed=failed,
            shards=shards or {},
        )
        self._fleet.submit(work)
        return await future

    def decode(
        self,
        step: int,
        part: Part,
        *,
        on_placed: Callable[[Part], None],
        on_failed: Callable[[str], None],
        urgent: Callable[[], bool],
        wanted: Callable[[], bool],
    ) -> None:
        """Have a part decoded and kept until the fleet releases `part.work`. `on_placed`: each time that a preprocessor takes it.

        `on_failed`: none could, after some pauses. `wanted`: whether to try again then.
        """
        rank = (step << 40) + (part.microbatch << 20) + part.replica
        pauses_s = iter(RETRY_PAUSES_S)

        def place(lease: str, endpoint: str) -> None:
            part.lease, part.endpoint = lease, endpoint
            on_placed(part)

        def failed(error: str) -> None:
            pause_s = next(pauses_s, None)
            if pause_s is None:
                on_failed(error)
            else:
                asyncio.get_running_loop().call_later(pause_s, again)

        def again() -> None:
            if wanted():
                self._fleet.submit(work)

        work = Work(
            job=self._job,
            share=self._share,
            priority=(step, DECODE, part.microbatch, part.replica),
            order=lambda lease: messages.decode_part(lease, self._job, part, step, rank),
            on_done=lambda _: None,
            on_failed=failed,
            on_placed=place,
            keep=True,
            urgent=urgent,
            shards=Counter(ref.shard for ref in part.samples),
        )
        part.work = work
        self._fleet.submit(work)
