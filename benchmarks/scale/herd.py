"""`python -m benchmarks.scale.herd ENDPOINTS JOB FIRST COUNT NUM_RANKS STEPS`: light ranks that all lose their leader at once.

They are those of benchmarks.scale.ranks, and train nothing. Once each of them knows the places of STEPS planned steps, `open` is
printed. When its stream breaks, a host goes to the next of the endpoints, which are separated by commas, with the pauses of real
ranks. Once all of them know these steps again, from another leader: one JSON object, with the times by the monotonic clock at
which each rank had its next plan (`plans`), and knew where all of its parts are (`places`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
from contextlib import suppress

import grpc

from benchmarks.scale.ranks import LightHost, LightRank
from benchmarks.scale.workload import HOST_RANKS
from headrace.herd import retry_pause_s

RETRY_S = 0.5


async def _stay(endpoints: str, job: str, ranks: list[LightRank], num_ranks: int, opened_again: asyncio.Event) -> None:
    """Have the sessions of one host's ranks with whoever leads, until cancelled."""
    several = endpoints.split(",")
    for tried, endpoint in enumerate(itertools.cycle(several), 1):
        host = LightHost(endpoint, ranks, num_ranks, 0.0)
        continues = any(rank.session for rank in ranks)
        with suppress(grpc.RpcError):
            await host.open(job)
            if continues:
                opened_again.set()
            host.listen()
            await host.wait()
        await host.close()
        for rank in ranks:
            rank.plans.clear()
            rank.places.clear()
        if tried % len(several) == 0:  # real ones ask the one that says that it leads
            await asyncio.sleep(retry_pause_s(RETRY_S, num_ranks // HOST_RANKS, random.random()))


async def _know(ranks: list[LightRank], steps: int) -> None:
    """Wait until every rank knows where all of its parts are in `steps` steps."""
    for rank in ranks:
        for step in range(steps):
            await rank.wait_for(step)


async def _run(endpoints: str, job: str, first: int, count: int, num_ranks: int, steps: int) -> dict[str, list[float]]:
    ranks = [LightRank(first + n) for n in range(count)]
    tasks, opened_again = [], []
    for n in range(0, count, HOST_RANKS):
        opened_again.append(asyncio.Event())
        tasks.append(asyncio.create_task(_stay(endpoints, job, ranks[n : n + HOST_RANKS], num_ranks, opened_again[-1])))
    await _know(ranks, steps)
    print("open", flush=True)
    for event in opened_again:
        await event.wait()
    await _know(ranks, steps)
    times = {what: [getattr(rank, what)[0] for rank in ranks] for what in ("plans", "places")}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return times


if __name__ == "__main__":
    endpoints, job, *numbers = sys.argv[1:]
    first, count, num_ranks, steps = map(int, numbers)
    print(json.dumps(asyncio.run(_run(endpoints, job, first, count, num_ranks, steps))), flush=True)
