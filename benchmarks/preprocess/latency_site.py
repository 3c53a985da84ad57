"""`python -m benchmarks.preprocess.latency_site FOLDER`: an HTTP server with EMULATED latency, which counts what it sends.

It has any number of shards that share few files on disk: `/NAME/shard-00017.tar` is one of those in FOLDER/NAME. Each request
waits, as on the way to a store that is far away; connections are kept. `/counts` tells requests and bytes since the last time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from pathlib import Path

from benchmarks.preprocess.remote_shards import Shards

_RANGE = re.compile(rb"range:\s*bytes=(\d+)-(\d+)", re.IGNORECASE)
_CHUNK_BYTES = 1 << 20


class _Site:
    def __init__(self, folder: Path, num_shards: int, latency_s: float) -> None:
        self._sets = {path.name: Shards(path, num_shards) for path in folder.iterdir() if path.is_dir()}
        self._latency_s = latency_s
        self._requests = self._sent = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                await self._answer(request, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        method, path = request.split(b" ", 2)[:2]
        if path == b"/counts":
            body = json.dumps({"requests": self._requests, "bytes": self._sent}).encode()
            self._requests = self._sent = 0
            writer.write(_head(200, len(body), "application/json") + body)
            return
        self._requests += 1
        await asyncio.sleep(self._latency_s)
        name, _, shard = path.decode().removeprefix("/").partition("/")
        found = self._sets[name].content(shard) if name in self._sets else None
        if found is None:
            writer.write(_head(404, 0, "text/plain"))
            return
        content, kind = found
        asked = _RANGE.search(request)
        start, stop = (int(asked[1]), min(int(asked[2]) + 1, len(content))) if asked else (0, len(content))
        extra = f"Content-Range: bytes {start}-{stop - 1}/{len(content)}\r\n" if asked else ""
        tag = f'ETag: "{shard}"\r\nAccept-Ranges: bytes\r\n'
        writer.write(_head(206 if asked else 200, stop - start, kind, extra + tag))
        while method != b"HEAD" and start < stop:
            chunk = content[start : min(stop, start + _CHUNK_BYTES)]
            writer.write(chunk)
            await writer.drain()
            self._sent += len(chunk)
            start += len(chunk)


def _head(status: int, length: int, kind: str, extra: str = "") -> bytes:
    return f"HTTP/1.1 {status} .\r\nContent-Length: {length}\r\nContent-Type: {kind}\r\n{extra}\r\n".encode()


async def _main(site: _Site) -> None:
    server = await asyncio.start_server(site.serve, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, required=True, help="of each set")
    parser.add_argument("--latency-s", type=float, required=True, help="that each request takes beside its transfer")
    options = parser.parse_args()
    asyncio.run(_main(_Site(options.folder, options.shards, options.latency_s)))
