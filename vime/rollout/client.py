"""The client of the router: a prompt's token ids in, sampled token ids with their logprobs out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vime.models.routing import Routing
from vime.rollout.engine.auth import ENGINE_HEADER
from vime.rollout.engine.server import SERVED_NAME
from vime.rollout.engine.version_ranges import VERSIONS
from vime.rollout.routes import BadRoutes, Routes, decode_routes
from vime.run.http_client import BadResponse, RetryingClient


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


class RolloutClient(RetryingClient):
    """Asks the router at `url`. Use as an async context manager.

    token: the router's. A server that does not answer (it may be restarting) is asked again for at most `patience`
    seconds.
    routing: the model's routers when every response must carry its routed experts.
    """

    def __init__(
        self, url: str, token: str, request_timeout: float, patience: float, routing: Routing | None = None
    ) -> None:
        self._url = url + "/v1/completions"
        super().__init__({"Authorization": f"Bearer {token}"}, request_timeout, patience)
        self._routing = routing

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
        headers, answer = await self.ask(self._url, body)
        try:
            return read_completions(answer, prompt, samples, self._routing)
        except BadRoutes as error:
            engine = headers.get(ENGINE_HEADER, "an unknown address")
            raise BadRoutes(f"the engine at {engine} cannot be replayed: {error}") from error


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
