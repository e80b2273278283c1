"""JSON over HTTP from a server that may be restarting or busy: asked once, or asked again within bounds.

`RetryingClient` is for asyncio and asks again. `Client` is for threads and asks once: its callers know when to ask
again. The run's own traffic carries its token, so neither uses a proxy that the environment names, unless told to.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import requests
from yarl import URL

from vime.errors import WaitTimeout

SERVED_SECONDS = 10.0
"""An attempt that lasted longer than this was being served when it broke off."""
MAX_SERVED = 3
"""Attempts at one request that may break off so."""
PAUSES = (0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts at a server that does not answer; the last one repeats."""
MAX_REDIRECTS = 3
TEXT_BYTES = 500
"""Of an answer that is quoted in an error."""


class BadResponse(Exception):
    """The server answered something that cannot be trained on; another try may go better."""


class RequestRefused(Exception):
    """The server understood the request and refuses it: asking again would not help."""

    def __init__(self, url: str, status: int, text: str) -> None:
        super().__init__(f"{url} answered {status}: {text}")
        self.status = status
        self.text = text


class Unavailable(Exception):
    """The server does not answer, is busy or broken. `status` is None without an answer."""

    def __init__(self, reason: str, status: int | None = None, text: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.text = text


def check_status(url: str, status: int, content: bytes) -> None:
    """Raises Unavailable or RequestRefused unless an answer is a good one."""
    if 200 <= status < 300:
        return
    text = content[:TEXT_BYTES].decode(errors="replace")
    # 408, 429 and 5xx say "not now": a full queue, an engine that restarts or waits for weights.
    if status in (408, 429) or status >= 500:
        raise Unavailable(f"status {status}: {text}", status, text)
    raise RequestRefused(url, status, text)


class Client:
    """Asks servers of this run, from any number of threads; each request carries a token."""

    def __init__(self) -> None:
        self._session = _session()

    def close(self) -> None:
        """Drop the connections."""
        self._session.close()

    def ask(
        self,
        method: str,
        url: str,
        token: str,
        timeout: float,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        *,
        once: bool = False,
    ) -> Any:
        """JSON of the answer; None for an empty one. timeout: seconds to connect, and seconds between two bytes.

        once: the request must not be made twice, so it goes over a connection of its own, which no server has closed
        meanwhile. Another is made again when its connection breaks: a server that closes an idle one has not ended.
        Raises TimeoutError, Unavailable, RequestRefused, or BadResponse for what is no JSON.
        """
        request = requests.Request(
            method, url, json=body, params=params, headers={"Authorization": f"Bearer {token}"}
        ).prepare()
        try:
            response = self._send(request, timeout, once)
        except requests.Timeout as error:
            raise TimeoutError(str(error)) from error
        except requests.RequestException as error:
            raise Unavailable(str(error)) from error
        check_status(url, response.status_code, response.content)
        return read_json(response.content) if response.content else None

    def _send(self, request: requests.PreparedRequest, timeout: float, once: bool) -> requests.Response:
        if not once:
            try:
                return self._session.send(request, timeout=timeout)
            except requests.Timeout:
                raise
            except requests.ConnectionError:
                pass
        with _session() as session:
            return session.send(request, timeout=timeout)


def _session() -> requests.Session:
    session = requests.Session()
    session.trust_env = False
    return session


class RetryingClient:
    """Asks servers. Use as an async context manager, or `close` it.

    A server that does not answer is asked again for at most `patience` seconds.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        request_timeout: float,
        patience: float,
        *,
        tries: int | None = None,
        connections: int = 0,
        max_answer: int | None = None,
        trust_env: bool = False,
    ) -> None:
        """request_timeout: seconds that one attempt may take.

        tries: attempts at one request, however long each lasts; None: see SERVED_SECONDS. connections: at most, 0 for
        no limit, because the caller bounds what is in flight. max_answer: bytes of an answer that are read, of a server
        that is not the run's own. trust_env: go through the proxy that the environment names.
        """
        self._headers = headers
        self._timeout = aiohttp.ClientTimeout(total=request_timeout, connect=30)
        self._patience = patience
        self._tries = tries
        self._connections = connections
        self._max_answer = max_answer
        self._trust_env = trust_env
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop the connections."""
        if self._session is not None:
            await self._session.close()

    async def ask(self, url: str, body: Any = None, patience: float | None = None) -> tuple[Mapping[str, str], Any]:
        """Headers and JSON of the answer to a POST of `body`, or to a GET without one.

        patience: another one than the client's. Raises BadResponse for what is no JSON, RequestRefused for another
        status than a good one, WaitTimeout, caused by the last Unavailable, when no server answered within the bounds.
        """
        patience = self._patience if patience is None else patience
        attempt = served = 0
        down_since = time.monotonic()
        while True:
            begun = time.monotonic()
            try:
                return await self._ask_once(url, body)
            except Unavailable as error:
                now = time.monotonic()
                if now - begun > SERVED_SECONDS:
                    # Until now a server was at work on it: patience begins when it stops answering.
                    served, down_since = served + 1, now
                pause = PAUSES[min(attempt, len(PAUSES) - 1)]
                used_up = served >= MAX_SERVED if self._tries is None else attempt + 1 >= self._tries
                if now - down_since + pause > patience or used_up:
                    waited = f"waited {now - down_since:.0f} s and {attempt + 1} attempts"
                    raise WaitTimeout(f"{waited} for an answer of {url}: {error}") from error
                attempt += 1
                await asyncio.sleep(pause)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={**self._headers, "Accept-Encoding": "identity"},
                auto_decompress=False,  # what is not unpacked cannot grow
                timeout=self._timeout,
                connector=aiohttp.TCPConnector(limit=self._connections),
                trust_env=self._trust_env,
            )
        return self._session

    async def _ask_once(self, url: str, body: Any) -> tuple[Mapping[str, str], Any]:
        session, method, target = self._open(), "GET" if body is None else "POST", URL(url)
        for _ in range(1 + MAX_REDIRECTS):
            try:
                async with session.request(method, target, json=body, allow_redirects=False) as response:
                    if response.status not in (307, 308) or "Location" not in response.headers:
                        content = await self._read(response)
                        check_status(url, response.status, content)
                        return response.headers, read_json(content)
                    further = target.join(URL(response.headers["Location"]))
            except (aiohttp.ClientError, TimeoutError) as error:
                raise Unavailable(f"{type(error).__name__}: {error}") from error
            if further.origin() != target.origin():
                text = f"it sends to {further.origin()}; prompts and answers go to no other host"
                raise RequestRefused(url, response.status, text)
            target = further
        raise RequestRefused(url, response.status, f"it redirects more than {MAX_REDIRECTS} times")

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        packed = response.headers.get("Content-Encoding", "identity")
        if packed != "identity":
            raise BadResponse(f"the answer is packed with {packed[:40]}, which was not asked for")
        if self._max_answer is None:
            return await response.read()
        content = bytearray()
        async for piece in response.content.iter_any():
            content += piece
            if len(content) > self._max_answer:
                raise BadResponse(f"the answer is longer than {self._max_answer} bytes")
        return bytes(content)


def read_json(content: bytes) -> Any:
    """The value in an answer. Raises BadResponse."""
    try:
        return json.loads(content)
    except ValueError as error:
        raise BadResponse(f"the answer is not JSON: {error}") from error
