"""`python -m benchmarks.scale.ranks ENDPOINT JOB FIRST COUNT NUM_RANKS`: light trainer ranks, which fetch nothing.

Each has a connection, a session and a stream of plans of its own. Once all sessions are open, `open` is printed, and a time
of the monotonic clock is read from standard input: then and every STEP_S after that all ranks commit the next step, as those
of a synchronous training do. At the job's end: one JSON object on standard output, with a list of [rank, step, seconds] for
`plans` (when its plan came), `places` (when it knew where all of its parts are) and `commits` (how long the commit took).
"""

from __future__ import annotations

import asyncio
import json
import sys
from time import monotonic

import grpc

from benchmarks.scale.workload import STEP_S, own_channel
from headrace.v1 import sessions_pb2, sessions_pb2_grpc

OPEN_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 60.0


class LightRank:
    """One session."""

    def __init__(self, endpoint: str, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.plans: dict[int, float] = {}
        self.places: dict[int, float] = {}
        self.commits: dict[int, float] = {}
        self._num_ranks = num_ranks
        self._missing: dict[int, set[str]] = {}  # step -> tickets whose place is not known
        self._arrived = asyncio.Condition()
        self._ended = False
        self._channel = own_channel(endpoint)
        self._stub = sessions_pb2_grpc.SessionsStub(self._channel)
        self._session = ""

    async def open(self, job: str) -> None:
        request = sessions_pb2.OpenRequest(job=job, rank=self.rank, num_ranks=self._num_ranks)
        self._session = (await self._stub.Open(request, timeout=OPEN_TIMEOUT_S)).session

    async def run(self, begin_s: float) -> None:
        """Until the job has ended."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            step = 0
            while await self._wait_for(step):
                await asyncio.sleep(begin_s + step * STEP_S - monotonic())
                began_s = monotonic()
                request = sessions_pb2.CommitRequest(session=self._session, step=step, loss=1.0)
                await self._stub.Commit(request, timeout=CALL_TIMEOUT_S)
                self.commits[step] = monotonic() - began_s
                step += 1
        await self._channel.close()

    async def _wait_for(self, step: int) -> bool:
        """Whether that step comes: true once all of its places are known."""
        async with asyncio.timeout(CALL_TIMEOUT_S), self._arrived:
            await self._arrived.wait_for(lambda: step in self.places or self._ended)
        return step in self.places

    async def _listen(self) -> None:
        async for message in self._stub.Plans(sessions_pb2.PlansRequest(session=self._session)):
            now_s = monotonic()
            for event in message.events:
                self._hear(event, now_s)
            complete = [step for step, missing in self._missing.items() if not missing]
            for step in complete:
                self.places[step] = now_s
                del self._missing[step]
            if complete or self._ended:
                async with self._arrived:
                    self._arrived.notify_all()

    def _hear(self, event: sessions_pb2.PlanEvent, now_s: float) -> None:
        kind = event.WhichOneof("event")
        if kind == "plan":
            self.plans[event.plan.step] = now_s
            self._missing[event.plan.step] = {ticket for item in event.plan.microbatches for ticket in item.tickets}
        elif kind == "location":
            for missing in self._missing.values():
                missing.discard(event.location.ticket)
        else:
            self._ended = True


async def _run(endpoint: str, job: str, first: int, count: int, num_ranks: int) -> dict[str, list[list[float]]]:
    ranks = [LightRank(endpoint, first + n, num_ranks) for n in range(count)]
    async with asyncio.TaskGroup() as group:
        for rank in ranks:
            group.create_task(rank.open(job))
    print("open", flush=True)
    begin_s = float(await asyncio.to_thread(sys.stdin.readline))
    async with asyncio.TaskGroup() as group:
        for rank in ranks:
            group.create_task(rank.run(begin_s))
    return {
        what: [[rank.rank, step, seconds] for rank in ranks for step, seconds in getattr(rank, what).items()]
        for what in ("plans", "places", "commits")
    }


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """An error that is not the cancellation of a call because of another error."""
    inner = [_cause(error) if isinstance(error, BaseExceptionGroup) else error for error in group.exceptions]
    return next((e for e in inner if not (isinstance(e, grpc.RpcError) and e.code() == grpc.StatusCode.CANCELLED)), inner[0])


if __name__ == "__main__":
    endpoint, job, *numbers = sys.argv[1:]
    try:
        print(json.dumps(asyncio.run(_run(endpoint, job, *map(int, numbers)))), flush=True)
    except* Exception as group:
        sys.exit(f"light ranks failed: {_cause(group)}")
