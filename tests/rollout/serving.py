"""A small HTTP server in the test's own event loop, for servers that play a part."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.Response]]


@asynccontextmanager
async def serving(posts: Mapping[str, Handler], gets: Mapping[str, Handler] | None = None) -> AsyncIterator[str]:
    """Serves each handler at its path on a free port; the URL without a path."""
    application = web.Application()
    for path, handler in posts.items():
        application.router.add_post(path, handler)
    for path, handler in (gets or {}).items():
        application.router.add_get(path, handler)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
