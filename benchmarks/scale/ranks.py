"""`python -m benchmarks.scale.ranks ENDPOINT JOB FIRST COUNT NUM_RANKS STEP_S`: light trainer ranks, which fetch nothing.

HOST_RANKS of them are a host, which has a connection and a stream for all of them, as a host's relay has
(headrace.trainer.loading.relay); each has a session of its own. Once all sessions are open, `open` is printed, and a time of the
monotonic clock is read from standard input: then and every STEP_S after that all ranks commit the next step, as those of a
synchronous training do. At the job's end: one JSON object on standard output, with a list of [rank, step, seconds] for `plans`
(when its plan came), `places` (when it knew where all of its parts are) and `commits` (how long the commit took).
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections.abc import AsyncIterator
from time import monotonic

import grpc

from benchmarks.scale.workload import HOST_RANKS, own_channel
from headrace.outbox import Outbox
from headrace.v1 import sessions_pb2, sessions_pb2_grpc

OPEN_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 60.0


class LightRank:
    """What one rank's session has been told, and when."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.session = ""
        self.generation: int | None = None
        self.plans: dict[int, float] = {}
        self.places: dict[int, float] = {}
        self.commits: dict[int, float] = {}
        self.committed: dict[int, asyncio.Future[None]] = {}
        self._missing: dict[int, set[str]] = {}  # step -> tickets whose place is not known
        self._arrived = asyncio.Condition()
        self._ended = False

    async def wait_for(self, step: int) -> bool:
        """Wait until all places of a step are known, and return whether they are: the job may have ended before it."""
        async with asyncio.timeout(CALL_TIMEOUT_S), self._arrived:
            await self._arrived.wait_for(lambda: step in self.places or self._ended)
        return step in self.places

    async def hear(self, events: sessions_pb2.PlanEvents, now_s: float) -> None:
        for event in events.events:
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


class LightHost:
    """The ranks of one host, and the stream that they share."""

    def __init__(self, endpoint: str, ranks: list[LightRank], num_ranks: int, step_s: float) -> None:
        self._ranks, self._num_ranks, self._step_s = ranks, num_ranks, step_s
        self._channel = own_channel(endpoint)
        self._stub = sessions_pb2_grpc.SessionsStub(self._channel)
        self._requests = Outbox[sessions_pb2.RelayRequest]()
        self._opened: dict[int, asyncio.Future[sessions_pb2.OpenReply]] = {}
        self._by_session: dict[str, LightRank] = {}
        self._hearing = asyncio.create_task(self._hear())

    async def open(self, job: str) -> None:
        """Open a session for each rank, which continues its former one if it had any. Raises RpcError where the stream breaks."""
        loop = asyncio.get_running_loop()
        for rank in self._ranks:
            self._opened[rank.rank] = loop.create_future()
            request = sessions_pb2.OpenRequest(
                job=job, rank=rank.rank, num_ranks=self._num_ranks, generation=rank.generation, continues=rank.session
            )
            asked = sessions_pb2.RelayedOpenRequest(call=rank.rank, request=request)
            self._requests.put(sessions_pb2.RelayRequest(opens=[asked]))
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await asyncio.wait((self._hearing, asyncio.gather(*self._opened.values())), return_when=asyncio.FIRST_COMPLETED)
        if self._hearing.done():
            self._hearing.result()
        for rank in self._ranks:
            reply = self._opened[rank.rank].result()
            rank.session, rank.generation = reply.session, reply.generation
            self._by_session[rank.session] = rank

    def listen(self) -> None:
        """Have the ranks told their plans."""
        self._requests.put(sessions_pb2.RelayRequest(listen=self._by_session))

    async def wait(self) -> None:
        """Wait until the stream ends. Raises RpcError where it breaks."""
        await self._hearing

    async def run(self, begin_s: float) -> None:
        """Train from `begin_s` on, by the monotonic clock, until the job has ended."""
        self.listen()
        async with asyncio.TaskGroup() as group:
            for rank in self._ranks:
                group.create_task(self._train(rank, begin_s))
        self._requests.end()
        await self.wait()
        await self.close()

    async def close(self) -> None:
        self._requests.end()
        self._hearing.cancel()
        await self._channel.close()

    async def _train(self, rank: LightRank, begin_s: float) -> None:
        step = 0
        while await rank.wait_for(step):
            await asyncio.sleep(begin_s + step * self._step_s - monotonic())
            began_s, committed = monotonic(), asyncio.get_running_loop().create_future()
            rank.committed[step] = committed
            self._commit(rank.session, step)
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await committed
            rank.commits[step] = monotonic() - began_s
            step += 1

    def _commit(self, session: str, step: int) -> None:
        commit = sessions_pb2.CommitRequest(session=session, step=step, loss=1.0, wait=True)
        self._requests.put(sessions_pb2.RelayRequest(commits=[commit]))

    async def _send(self) -> AsyncIterator[sessions_pb2.RelayRequest]:
        async for requests in self._requests.batches():
            merged = requests[0]
            for further in requests[1:]:
                merged.MergeFrom(further)
            yield merged

    async def _hear(self) -> None:
        by_session = self._by_session
        async for reply in self._stub.Relay(self._send()):
            now_s = monotonic()
            for opened in reply.opened:
                if opened.status:
                    raise RuntimeError(f"rank {opened.call} has no session: {opened.error}")
                self._opened[opened.call].set_result(opened.reply)
            for told in reply.events:
                written = zlib.decompress(told.events) if told.compressed else told.events
                events = sessions_pb2.PlanEvents.FromString(written)
                for session in told.sessions:
                    await by_session[session].hear(events, now_s)
            for end in reply.ends:
                if end.status:
                    raise RuntimeError(f"session {end.session} ended: {end.error}")
            for answer in reply.commits:
                if answer.status:
                    raise RuntimeError(f"step {answer.step} was not committed: {answer}")
                for session in answer.sessions:
                    if answer.reply.committed:
                        by_session[session].committed.pop(answer.step).set_result(None)
                    else:  # other ranks take long
                        self._commit(session, answer.step)


async def _run(endpoint: str, job: str, first: int, count: int, num_ranks: int, step_s: float) -> dict[str, list[list[float]]]:
    ranks = [LightRank(first + n) for n in range(count)]
    hosts = [LightHost(endpoint, ranks[n : n + HOST_RANKS], num_ranks, step_s) for n in range(0, count, HOST_RANKS)]
    async with asyncio.TaskGroup() as group:
        for host in hosts:
            group.create_task(host.open(job))
    print("open", flush=True)
    begin_s = float(await asyncio.to_thread(sys.stdin.readline))
    async with asyncio.TaskGroup() as group:
        for host in hosts:
            group.create_task(host.run(begin_s))
    return {
        what: [[rank.rank, step, seconds] for rank in ranks for step, seconds in getattr(rank, what).items()]
        for what in ("plans", "places", "commits")
    }


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that began it, and not the cancellation of a call that followed from it."""
    inner = [_cause(error) if isinstance(error, BaseExceptionGroup) else error for error in group.exceptions]
    return next((e for e in inner if not (isinstance(e, grpc.RpcError) and e.code() == grpc.StatusCode.CANCELLED)), inner[0])


if __name__ == "__main__":
    endpoint, job, *numbers, step_s = sys.argv[1:]
    try:
        first, count, num_ranks = map(int, numbers)
        print(json.dumps(asyncio.run(_run(endpoint, job, first, count, num_ranks, float(step_s)))), flush=True)
    except* Exception as group:
        sys.exit(f"light ranks failed: {_cause(group)}")
