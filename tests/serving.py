"""A small web server of a test, on loopback."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def serving(routes: Iterable[web.AbstractRouteDef]) -> AsyncIterator[str]:
    """The address of a server with these routes, such as http://127.0.0.1:40123. It does not wait for its clients."""
    app = web.Application()
    app.add_routes(list(routes))
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
