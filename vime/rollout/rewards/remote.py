"""A reward that another server computes: one POST a sample, asked again within bounds."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from vime.rollout.http_client import PAUSES


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
        self._session: aiohttp.ClientSession | None = None

    async def score(self, **fields: Any) -> Any:
        """Raises TimeoutError, ConnectionError with the last reason, or ValueError for an answer that is no JSON."""
        async with asyncio.timeout(self._timeout):
            for attempt in range(self._tries):
                if attempt:
                    await asyncio.sleep(PAUSES[min(attempt - 1, len(PAUSES) - 1)])
                try:
                    status, content = await self._post(fields)
                except aiohttp.ClientError as error:
                    reason = f"{type(error).__name__}: {error}"
                    continue
                if status == 200:
                    return json.loads(content)
                reason = f"status {status}: {content[:200].decode(errors='replace')}"
                if status < 500 and status not in (408, 429):
                    raise ConnectionError(f"{self._url} answered {reason}")
            raise ConnectionError(f"{self._url} failed {self._tries} times, at last: {reason}")

    async def close(self) -> None:
        """Drops the connections."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, fields: dict[str, Any]) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=True)
        async with self._session.post(self._url, json=fields) as answer:
            return answer.status, await answer.read()
