"""Who may speak to an engine, and when: the ASGI middleware that every vLLM server of a run is started with.

vLLM's own --api-key guards the paths under /v1 and a few more, and leaves the weight, pause and collective_rpc routes
open to anyone who reaches the port. This one guards every path but /health, and it keeps a restarted engine out of the
router until it has been given the current weights.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATH = "/health"
GATED_PREFIXES = ("/health", "/v1/", "/v2/", "/inference/")
OPENING_PATH = "/finish_weight_update"


GENERATION_PREFIX = "/v1/"
ENGINE_HEADER = "X-Vime-Engine"
"""Of every answer to a generation request: host and port of the engine, which one behind the router it was."""


class RunTokenMiddleware:
    """401 without this engine's token; 503 on generation and health until the first weight update of a gated engine.

    VIME_ENGINE_TOKEN opens every route, VIME_GENERATION_TOKEN those that generate; as variables they are on no command
    line. VIME_ENGINE_GATED=1 closes the gate. A server without tokens refuses to start rather than to serve openly.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.expected = f"Bearer {_secret('VIME_ENGINE_TOKEN')}".encode()
        self.expected_for_generation = f"Bearer {_secret('VIME_GENERATION_TOKEN')}".encode()
        self.gated = os.environ.get("VIME_ENGINE_GATED") == "1"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            # vLLM has websocket routes (/v1/realtime); nothing of vime speaks them.
            await send({"type": "websocket.close", "code": 1008})
            return
        path = scope["path"]
        if not self._authorised(scope) and (path != OPEN_PATH or _has_body(scope)):
            await _answer(send, 401, b'{"error":"this run\'s token is required"}', close=True)
            return
        if self.gated and path.startswith(GATED_PREFIXES):
            await _answer(send, 503, b'{"error":"this engine waits for the current weights"}')
            return
        if self.gated and path == OPENING_PATH:
            send = self._opening(send)
        if path.startswith(GENERATION_PREFIX) and scope.get("server"):
            send = _signed(send, scope["server"])
        await self.app(scope, receive, send)

    def _authorised(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        if hmac.compare_digest(given[0], self.expected):
            return True
        for_generation = hmac.compare_digest(given[0], self.expected_for_generation)
        return for_generation and scope["path"].startswith(GENERATION_PREFIX)

    def _opening(self, send: Send) -> Send:
        async def observed(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self.gated = False
            await send(message)

        return observed


def _secret(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise RuntimeError(f"{name} is not set: an engine of a run does not serve without its tokens")
    return value


def _signed(send: Send, server: tuple[str, int]) -> Send:
    name = f"{server[0]}:{server[1]}".encode()

    async def signing(message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (ENGINE_HEADER.lower().encode(), name)]
        await send(message)

    return signing


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


async def _answer(send: Send, status: int, body: bytes, close: bool = False) -> None:
    """close: the server ends the connection, instead of reading the request's body to its end first."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
