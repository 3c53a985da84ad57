"""`python -m benchmarks.scale.listeners ENDPOINT`: ranks that read what they are told, and parse none of it.

A line of JSON on standard input names their sessions; each listens over a connection of its own. At the end: one JSON list on
standard output, how many bytes each has heard.
"""

from __future__ import annotations

import asyncio
import json
import sys

from benchmarks.scale.workload import own_channel
from headrace.v1 import sessions_pb2


async def _listen(endpoint: str, session: str) -> int:
    async with own_channel(endpoint) as channel:
        plans = channel.unary_stream(
            "/headrace.v1.Sessions/Plans", request_serializer=sessions_pb2.PlansRequest.SerializeToString
        )
        return sum([len(message) async for message in plans(sessions_pb2.PlansRequest(session=session))])


async def _run(endpoint: str, sessions: list[str]) -> list[int]:
    return await asyncio.gather(*(_listen(endpoint, session) for session in sessions))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_run(sys.argv[1], json.loads(sys.stdin.readline())))), flush=True)
