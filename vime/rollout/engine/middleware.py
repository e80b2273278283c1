"""What stands in front of every vLLM server of a run, as the one ASGI middleware that it is started with."""

from __future__ import annotations

from vime.rollout.engine.auth import App, Receive, RunTokenMiddleware, Scope, Send
from vime.rollout.engine.version_ranges import VersionRanges


class EngineMiddleware:
    """The token first, then the policy versions of what is generated."""

    def __init__(self, app: App) -> None:
        self.app = RunTokenMiddleware(VersionRanges(app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)
