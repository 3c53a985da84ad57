"""`python -m benchmarks.page.hello`: a server of aiohttp that answers every path with a page of one word, as little as it can do.

Prints the URL that it listens at.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

PAGE = '<!doctype html><html lang="en"><title>hello</title><p>hello'


async def hello(_request: web.Request) -> web.Response:
    """Answer a page."""
    return web.Response(text=PAGE, content_type="text/html")


async def main() -> None:
    """Serve until it is killed."""
    application = web.Application()
    application.router.add_get("/{path:.*}", hello)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    print(f"http://{host}:{port}/", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
