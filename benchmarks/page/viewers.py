"""`python -m benchmarks.page.viewers URL JOB SECONDS`: VIEWERS open pages of one job, each with a connection of its own.

Each asks for PATHS once a second, as the page does, at a time of the second that is its own. Prints one JSON object with the
seconds that the answers to the job's path took, and how many answers there were.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiohttp

VIEWERS = 50
PERIOD_S = 1.0
PATHS = ("/api/service", "/api/jobs/{job}", "/api/jobs/{job}/steps")
TIMED = PATHS[1]


async def view(session: aiohttp.ClientSession, job: str, ends_s: float, late_s: float, took_s: list[float]) -> int:
    """Ask until `ends_s`, `late_s` after the whole second; return the number of answers. Raises ClientError for a refusal."""
    etags: dict[str, str] = {}
    asked = 0
    next_s = time.perf_counter() + late_s
    while next_s < ends_s:
        await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
        for path in PATHS:
            headers = {"If-None-Match": etags[path]} if path in etags else {}
            began_s = time.perf_counter()
            async with session.get(path.format(job=job), headers=headers) as reply:
                reply.raise_for_status()
                await reply.read()
            if path == TIMED:
                took_s.append(time.perf_counter() - began_s)
            etags[path] = reply.headers["ETag"]
            asked += 1
        next_s += PERIOD_S
    return asked


async def main(url: str, job: str, seconds: float) -> None:
    """Ask for so many seconds, and print what it took."""
    took_s: list[float] = []
    ends_s = time.perf_counter() + seconds
    sessions = [aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=1)) for _ in range(VIEWERS)]
    try:
        views = (view(one, job, ends_s, PERIOD_S * n / VIEWERS, took_s) for n, one in enumerate(sessions))
        asked = await asyncio.gather(*views)
    finally:
        for session in sessions:
            await session.close()
    print(json.dumps({"took_s": took_s, "answers": sum(asked)}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
