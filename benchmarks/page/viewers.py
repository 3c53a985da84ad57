"""`python -m benchmarks.page.viewers URL JOB SECONDS [--poll]`: VIEWERS open pages of a job, each with a connection of its own.

Each does what the page's script does: it asks once for what the view of the job's steps shows, reads what changes of it as long
as the service goes on to tell, and asks again when that has ended. With --poll it asks for PATH once a second instead, as pages
do that are not told. Prints one JSON object: the seconds to the first answer, or to each of those that are polled; how many
answers, or lines, there were; and when viewers were told of so many committed steps, in seconds since 1970.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from urllib.parse import quote

import aiohttp

VIEWERS = 50
PERIOD_S = 1.0
"""Between two questions of one who polls, and at least between two of one who is told."""
PATH = "/api/jobs/{job}"
PARTS = ("service", "jobs/{job}", "jobs/{job}/steps?last=200")
"""What the page watches while it shows the steps of a job (static/route.js)."""
LONGEST_LINE = 1 << 20
PATIENCE_S = 8.0
"""The page takes a service that is silent for so long for lost."""


@dataclass(slots=True)
class Seen:
    """What all viewers have seen."""

    took_s: list[float] = field(default_factory=list)
    answers: int = 0
    told_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Committed steps -> when each viewer was told of so many."""


def question(job: str) -> str:
    """Return the path that a page asks for which shows the steps of a job."""
    return "/api/watch?" + "&".join(f"ask={quote(part.format(job=job), safe='')}" for part in PARTS)


async def watch(session: aiohttp.ClientSession, job: str, ends_s: float, seen: Seen) -> None:
    """Be told until `ends_s`, in seconds of time.perf_counter. Raises ClientError for a refusal, TimeoutError for silence."""
    path = question(job)
    named = PARTS[1].format(job=job)
    while (began_s := time.perf_counter()) < ends_s:
        first = True
        async with session.get(path) as reply:
            reply.raise_for_status()
            while line := await asyncio.wait_for(reply.content.readline(), PATIENCE_S):
                if first:
                    seen.took_s.append(time.perf_counter() - began_s)
                seen.answers += 1
                told = json.loads(line) if line.strip() else {}
                if named in told and not first:
                    seen.told_s[told[named]["body"]["committed_steps"]].append(time.time())
                first = False
                if time.perf_counter() >= ends_s:
                    return
        await asyncio.sleep(max(0.0, began_s + PERIOD_S - time.perf_counter()))


async def poll(session: aiohttp.ClientSession, job: str, ends_s: float, seen: Seen) -> None:
    """Ask once a second until `ends_s`, in seconds of time.perf_counter. Raises ClientError for a refusal."""
    next_s = time.perf_counter()
    while next_s < ends_s:
        await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
        began_s = time.perf_counter()
        async with session.get(PATH.format(job=job)) as reply:
            reply.raise_for_status()
            await reply.read()
        seen.took_s.append(time.perf_counter() - began_s)
        seen.answers += 1
        next_s += PERIOD_S


async def main(url: str, job: str, seconds: float, polls: bool) -> None:
    """Look for so many seconds, and print what was seen."""
    seen = Seen()
    ends_s = time.perf_counter() + seconds
    sessions = [
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=1), read_bufsize=LONGEST_LINE) for _ in range(VIEWERS)
    ]

    async def begun(number: int, session: aiohttp.ClientSession) -> None:
        await asyncio.sleep(PERIOD_S * number / VIEWERS)  # they were not opened at the same moment
        await (poll if polls else watch)(session, job, ends_s, seen)

    try:
        await asyncio.gather(*(begun(number, session) for number, session in enumerate(sessions)))
    finally:
        for session in sessions:
            await session.close()
    print(json.dumps({"took_s": seen.took_s, "answers": seen.answers, "told_s": seen.told_s}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page.viewers")
    parser.add_argument("url")
    parser.add_argument("job")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--poll", action="store_true")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.url, arguments.job, arguments.seconds, arguments.poll))
