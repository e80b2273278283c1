"""The client of the router: a prompt's token ids in, sampled token ids with their logprobs out."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from vime.errors import WaitTimeout
from vime.models.routing import Routing
from vime.rollout.auth import ENGINE_HEADER
from vime.rollout.routes import BadRoutes, Routes, decode_routes
from vime.rollout.server import SERVED_NAME
from vime.rollout.version_ranges import VERSIONS

SERVED_SECONDS = 10.0
"""An attempt that lasted longer than this was being served when it broke off."""
MOST_SERVED = 3
"""Attempts at one request that may break off so."""
PAUSES = (0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts at a server that does not answer; the last one repeats."""


class BadResponse(Exception):
    """The engine answered something that cannot be trained on; another try may go better."""


class RequestRefused(Exception):
    """The engine understood the request and refuses it: asking again would not help."""


class _Unavailable(Exception):
    pass


@dataclass(frozen=True)
class Sampling:
    """How to sample."""

    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides; they stay its last tokens."""


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled response, its stop token included."""

    token_ids: NDArray[np.int32]
    """[R]"""
    logprobs: NDArray[np.float32]
    """[R] natural log-probability under the distribution that was sampled from."""
    finish_reason: str
    """stop or length."""
    versions: NDArray[np.int32]
    """[K, 2] rows (first position, policy version): the weights that sampled the tokens from there on."""
    routes: Routes | None = None
    """The experts that the prompt's and the response's tokens used, where they are asked for."""


class RolloutClient:
    """Asks the router at `url`. Use as an async context manager.

    A server that does not answer (it may be restarting) is asked again for at most `patience` seconds.
    routing: the model's routers when every response must carry its routed experts.
    """

    def __init__(
        self, url: str, token: str, request_timeout: float, patience: float, routing: Routing | None = None
    ) -> None:
        self._url = url + "/v1/completions"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._timeout = aiohttp.ClientTimeout(total=request_timeout, connect=30)
        self._patience = patience
        self._routing = routing
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RolloutClient:
        # The caller bounds what is in flight; aiohttp's own limit of 100 connections would bound it a second time.
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0), trust_env=False
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def complete(
        self, prompt: list[int], samples: int, max_tokens: int, sampling: Sampling, seed: int | None
    ) -> list[Completion]:
        """`samples` responses to one prompt. With a seed, sample i is drawn with seed + i.

        Raises BadResponse, RequestRefused, BadRoutes, or WaitTimeout when no server answered within the patience.
        """
        body = {
            "model": SERVED_NAME,
            "prompt": prompt,
            "n": samples,
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }
        if sampling.stop:
            body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        if seed is not None:
            body["seed"] = seed
        engine, answer = await self._post(body)
        try:
            return read_completions(answer, prompt, samples, self._routing)
        except BadRoutes as error:
            raise BadRoutes(f"the engine at {engine} cannot be replayed: {error}") from error

    async def _post(self, body: dict[str, Any]) -> tuple[str, Any]:
        """The engine that answered and its answer."""
        attempt = served = 0
        down_since = time.monotonic()
        while True:
            begun = time.monotonic()
            try:
                return await self._post_once(body)
            except _Unavailable as error:
                now = time.monotonic()
                if now - begun > SERVED_SECONDS:
                    # Until now an engine was at work on it: patience begins when the engines stop answering.
                    served, down_since = served + 1, now
                pause = PAUSES[min(attempt, len(PAUSES) - 1)]
                if now - down_since + pause > self._patience or served >= MOST_SERVED:
                    waited = f"waited {now - down_since:.0f} s and {attempt + 1} attempts"
                    raise WaitTimeout(f"{waited} for an answer of {self._url}: {error}") from error
                attempt += 1
                await asyncio.sleep(pause)

    async def _post_once(self, body: dict[str, Any]) -> tuple[str, Any]:
        assert self._session is not None
        try:
            async with self._session.post(self._url, json=body) as response:
                content = await response.read()
                status = response.status
                engine = response.headers.get(ENGINE_HEADER, "an unknown address")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _Unavailable(f"{type(error).__name__}: {error}") from error
        if status == 200:
            try:
                return engine, json.loads(content)
            except ValueError as error:
                raise BadResponse(f"the answer is not JSON: {error}") from error
        text = content[:300].decode(errors="replace")
        # 408, 429 and 5xx say "not now": a full queue, an engine that restarts or waits for weights.
        if status in (408, 429) or status >= 500:
            raise _Unavailable(f"status {status}: {text}")
        raise RequestRefused(f"{self._url} answered {status}: {text}")


def read_completions(answer: Any, prompt: list[int], samples: int, routing: Routing | None = None) -> list[Completion]:
    """Checks an answer of /v1/completions and takes the responses out of it, with their routes if `routing` is given.

    Raises BadResponse naming what is wrong: ids or logprobs missing, unequal in number or not finite, another prompt
    than the one sent, another number of choices. Raises BadRoutes when a whole response's routes are not there.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != samples:
        found = len(choices) if isinstance(choices, list) else "no"
        raise BadResponse(f"{found} choices, {samples} were asked for")
    by_index = {choice.get("index"): choice for choice in choices if isinstance(choice, dict)}
    if sorted(by_index, key=str) != sorted(range(samples), key=str):
        raise BadResponse(f"choices are numbered {sorted(by_index, key=str)}")
    versions = answer.get(VERSIONS)
    if not isinstance(versions, dict) or not isinstance(ranges := versions.get("ranges"), dict):
        raise BadResponse("the engine does not say which policy version sampled the response")
    whole = _read_versions([[0, versions.get("start")]])
    rows = [_read_versions(ranges[str(i)]) if str(i) in ranges else whole for i in range(samples)]
    return [_read_choice(by_index[i], prompt, rows[i], routing) for i in range(samples)]


def _read_choice(
    choice: dict[str, Any], prompt: list[int], versions: NDArray[np.int32], routing: Routing | None
) -> Completion:
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise BadResponse(f"finish_reason is {reason!r}")
    if choice.get("prompt_token_ids") != prompt:
        raise BadResponse("the engine answered to another prompt than the one sent")
    ids = choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        raise BadResponse("the response has no token ids or no logprobs")
    if len(ids) != len(logprobs) or not ids:
        raise BadResponse(f"{len(ids)} token ids and {len(logprobs)} logprobs")
    try:
        tokens, values = np.asarray(ids, np.int32), np.asarray(logprobs, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadResponse(f"token ids or logprobs are not numbers: {error}") from error
    if not np.isfinite(values).all():
        raise BadResponse(f"the logprob of response token {int(np.argmin(np.isfinite(values)))} is not finite")
    routes = None
    if routing is not None:
        routes = decode_routes(choice.get("routed_experts"), len(prompt) + len(tokens), routing)
    if len(versions) > 1:
        versions = versions[versions[:, 0] < len(tokens)]  # an update after the last token sampled none
    return Completion(tokens, values, reason, versions, routes)


def _read_versions(rows: Any) -> NDArray[np.int32]:
    try:
        read = np.asarray(rows, np.int32)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadResponse(f"policy versions are not rows of numbers: {error}") from error
    if read.ndim != 2 or read.shape[1] != 2 or not len(read) or read[0, 0] != 0 or (read[1:, 0] <= read[:-1, 0]).any():
        raise BadResponse(f"policy versions {rows} are not rows (first position, version) from 0 on")
    return read
