"""A reward that another server computes: one POST a sample, asked again within bounds."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from vime.errors import WaitTimeout
from vime.run.http_client import BadResponse, RequestRefused, RetryingClient

CONNECTIONS = 100
"""To a server that may not expect as many requests as a step has samples."""
MAX_ANSWER = 1 << 20
"""Bytes of an answer that are read."""


class RemoteScorer:
    """Posts {"prompt", "response", "answer", "record", "metadata"} to `url` and takes the JSON of the answer.

    That is a number, null for "cannot say", or an object with the number under `data.reward_key`. A server that cannot
    be reached, is busy (408, 429) or broken (5xx) is asked `tries` times; another status is final. The connections
    belong to the event loop that calls it first.
    """

    def __init__(self, url: str, tries: int, timeout: float) -> None:
        """timeout: seconds for all tries of one sample."""
        self._url = url
        self._tries = tries
        self._timeout = timeout
        # Not the run's own traffic: the server may be behind a proxy. One bound in seconds holds, for all tries.
        bounds: dict[str, Any] = {"tries": tries, "connections": CONNECTIONS, "max_answer": MAX_ANSWER}
        self._client = RetryingClient({}, 2 * timeout, math.inf, trust_env=True, **bounds)

    async def score(self, **fields: Any) -> Any:
        """Raises TimeoutError, ConnectionError with the last reason, or ValueError for an answer that is no JSON."""
        try:
            async with asyncio.timeout(self._timeout):
                _, answer = await self._client.ask(self._url, fields)
                return answer
        except WaitTimeout as error:
            raise ConnectionError(f"{self._url} failed {self._tries} times, at last: {error.__cause__}") from error
        except RequestRefused as error:
            raise ConnectionError(f"{self._url} answered status {error.status}: {error.text}") from error
        except BadResponse as error:
            raise ValueError(str(error)) from error

    async def close(self) -> None:
        """Drops the connections."""
        await self._client.close()
