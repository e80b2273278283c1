"""JSON over HTTP from a server that may be restarting or busy: asked again, within bounds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from vime.errors import WaitTimeout

SERVED_SECONDS = 10.0
"""An attempt that lasted longer than this was being served when it broke off."""
MAX_SERVED = 3
"""Attempts at one request that may break off so."""
PAUSES = (0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts at a server that does not answer; the last one repeats."""


class BadResponse(Exception):
    """The server answered something that cannot be trained on; another try may go better."""


class RequestRefused(Exception):
    """The server understood the request and refuses it: asking again would not help."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class _Unavailable(Exception):
    pass


class RetryingClient:
    """Asks servers. Use as an async context manager.

    A server that does not answer is asked again for at most `patience` seconds. trust_env: go through the proxy that
    the environment names.
    """

    def __init__(
        self, headers: Mapping[str, str], request_timeout: float, patience: float, *, trust_env: bool = False
    ) -> None:
        """request_timeout: seconds that one attempt may take."""
        self._headers = headers
        self._timeout = aiohttp.ClientTimeout(total=request_timeout, connect=30)
        self._patience = patience
        self._trust_env = trust_env
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # The caller bounds what is in flight; aiohttp's own limit of 100 connections would bound it a second time.
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=self._timeout,
            connector=aiohttp.TCPConnector(limit=0),
            trust_env=self._trust_env,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, url: str, body: Any = None, patience: float | None = None) -> tuple[Mapping[str, str], Any]:
        """Headers and JSON of the answer to a POST of `body`, or to a GET without one.

        patience: another one than the client's. Raises BadResponse for what is no JSON, RequestRefused for another
        status than 200, WaitTimeout when no server answered within the patience.
        """
        patience = self._patience if patience is None else patience
        attempt = served = 0
        down_since = time.monotonic()
        while True:
            begun = time.monotonic()
            try:
                return await self._ask_once(url, body)
            except _Unavailable as error:
                now = time.monotonic()
                if now - begun > SERVED_SECONDS:
                    # Until now a server was at work on it: patience begins when it stops answering.
                    served, down_since = served + 1, now
                pause = PAUSES[min(attempt, len(PAUSES) - 1)]
                if now - down_since + pause > patience or served >= MAX_SERVED:
                    waited = f"waited {now - down_since:.0f} s and {attempt + 1} attempts"
                    raise WaitTimeout(f"{waited} for an answer of {url}: {error}") from error
                attempt += 1
                await asyncio.sleep(pause)

    async def _ask_once(self, url: str, body: Any) -> tuple[Mapping[str, str], Any]:
        assert self._session is not None
        request = self._session.get(url) if body is None else self._session.post(url, json=body)
        try:
            async with request as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _Unavailable(f"{type(error).__name__}: {error}") from error
        if response.status == 200:
            try:
                return response.headers, json.loads(content)
            except ValueError as error:
                raise BadResponse(f"the answer is not JSON: {error}") from error
        text = content[:300].decode(errors="replace")
        # 408, 429 and 5xx say "not now": a full queue, an engine that restarts or waits for weights.
        if response.status in (408, 429) or response.status >= 500:
            raise _Unavailable(f"status {response.status}: {text}")
        raise RequestRefused(f"{url} answered {response.status}: {text}", response.status)
