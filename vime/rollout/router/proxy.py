"""The run token in front of the router.

`vllm-router` does not ask for its api key on most routes, and passes requests for routes that it does not know
(/pause, /collective_rpc, ...) on to an engine *with* that key. So the router itself listens on the loopback interface
and knows no key; what the run publishes is this: a server that lets through one route, to those who hold the token.
Where the kernel can, the router's port takes connections of this process only (see `socket_key`).
"""

from __future__ import annotations

import hmac
import json
import socket
from typing import Any

import aiohttp
from aiohttp import web

from vime.rollout.engine.auth import ENGINE_HEADER
from vime.rollout.router.socket_key import set_key
from vime.run.tokens import generation_token, router_token

COMPLETIONS = "/v1/completions"
MAX_BODY = 64 << 20


class Proxy:
    """Answers for the router at `backend`."""

    def __init__(self, backend: str, token: str, request_timeout: float) -> None:
        self.key: bytes | None = None
        """Of the router's port, once it has one."""
        self._backend = backend
        self._expected = f"Bearer {router_token(token)}".encode()
        # Engines take this one for generation only: whoever got hold of it could not touch weights.
        self._onward = f"Bearer {generation_token(token)}"
        self._timeout = aiohttp.ClientTimeout(total=request_timeout, connect=10)
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        """The aiohttp application: every path goes through `handle`."""
        application = web.Application(client_max_size=MAX_BODY)
        application.router.add_route("*", "/{path:.*}", self.handle, expect_handler=self._expect)
        application.on_startup.append(self._open)
        application.on_cleanup.append(self._close)
        return application

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """/health for anyone; POST /v1/completions with the token; nothing else. Reads no body before it has agreed."""
        if request.path == "/health":
            return await self._health()
        return self._refusal(request) or await self._forward(await request.read())

    def _refusal(self, request: web.Request) -> web.Response | None:
        given = request.headers.getall("Authorization", [])
        if len(given) != 1 or not hmac.compare_digest(given[0].encode(errors="surrogateescape"), self._expected):
            return web.json_response({"error": "this run's token is required"}, status=401)
        if request.path != COMPLETIONS or request.method != "POST":
            return web.json_response({"error": f"only POST {COMPLETIONS} passes the router"}, status=404)
        if (request.content_length or 0) > MAX_BODY:
            return web.json_response({"error": f"a request has at most {MAX_BODY} bytes"}, status=413)
        return None

    async def _expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answers a client that asks before it sends its body."""
        refusal = self._refusal(request)
        if refusal is None and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return refusal

    async def _forward(self, body: bytes) -> web.StreamResponse:
        assert self._session is not None
        headers = {"Authorization": self._onward, "Content-Type": "application/json"}
        try:
            async with self._session.post(self._backend + COMPLETIONS, data=body, headers=headers) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return web.json_response({"error": f"the router did not answer: {type(error).__name__}"}, status=502)
        engine = {name: value for name, value in answer.headers.items() if name.lower() == ENGINE_HEADER.lower()}
        return web.Response(body=content, status=answer.status, content_type="application/json", headers=engine)

    async def _health(self) -> web.StreamResponse:
        assert self._session is not None
        try:
            async with self._session.get(self._backend + "/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return web.Response(status=answer.status)
        except (aiohttp.ClientError, TimeoutError):
            return web.Response(status=503)

    async def workers(self) -> set[str]:
        """The engines that the router sends requests to. Raises aiohttp.ClientError or TimeoutError."""
        assert self._session is not None
        async with self._session.get(self._backend + "/list_workers", timeout=aiohttp.ClientTimeout(total=5)) as answer:
            listed = json.loads(await answer.read())
        return set(listed["urls"])

    async def _open(self, application: web.Application) -> None:
        self._session = aiohttp.ClientSession(
            timeout=self._timeout,
            connector=aiohttp.TCPConnector(limit=0, socket_factory=self._socket),
            trust_env=False,
        )

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        if self.key is not None:
            set_key(made, self.key)
        return made

    async def _close(self, application: web.Application) -> None:
        assert self._session is not None
        await self._session.close()
