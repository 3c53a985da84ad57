"""`python -m benchmarks.scale.listeners ENDPOINT`: ranks that read what they are told, and parse none of it.

A line of JSON on standard input names their sessions; HOST_RANKS of them are a host, which listens over a connection of its own.
At the end: one JSON list on standard output, how many bytes each host has heard.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

from benchmarks.scale.workload import HOST_RANKS, own_channel
from headrace.v1 import sessions_pb2

PARSED_BYTES = 4096  # only short messages can be those that say that the sessions have ended


async def _listen(endpoint: str, sessions: list[str]) -> int:
    num_bytes, listening, ended = 0, set(sessions), asyncio.Event()

    async def ask() -> AsyncIterator[sessions_pb2.RelayRequest]:
        yield sessions_pb2.RelayRequest(listen=sessions)
        await ended.wait()

    async with own_channel(endpoint) as channel:
        relay = channel.stream_stream(
            "/headrace.v1.Sessions/Relay", request_serializer=sessions_pb2.RelayRequest.SerializeToString
        )
        async for message in relay(ask()):
            num_bytes += len(message)
            if len(message) < PARSED_BYTES:
                listening -= {end.session for end in sessions_pb2.RelayReply.FromString(message).ends}
            if not listening:
                ended.set()
    return num_bytes


async def _run(endpoint: str, sessions: list[str]) -> list[int]:
    hosts = [sessions[n : n + HOST_RANKS] for n in range(0, len(sessions), HOST_RANKS)]
    return await asyncio.gather(*(_listen(endpoint, of_host) for of_host in hosts))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_run(sys.argv[1], json.loads(sys.stdin.readline())))), flush=True)
