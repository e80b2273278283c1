"""A server that plays a teacher: it answers what vLLM answers, or what a broken one might."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.rollout.serving import serving


def logprob(ids: list[int], position: int) -> float:
    """What it says of the token at a position: a float32 of its own for each token and place."""
    return -(ids[position] * 8 + position) / 8


@dataclass
class PlayedTeacher:
    """`busy`: requests that it refuses with 503 first. `change` is given the answer before it is sent."""

    vocabulary: int = 264
    longest: int = 129
    key: str | None = None
    busy: int = 0
    change: Callable[[dict[str, Any]], Any] = lambda answer: answer
    asked: list[dict[str, Any]] = field(default_factory=list)

    def serving(self) -> AbstractAsyncContextManager[str]:
        """Serves on a free port; its URL."""
        return serving({"/v1/completions": self._complete}, {"/v1/models": self._models})

    async def _models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": "big", "max_model_len": self.longest}, {"id": "adapter"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        if self.busy:
            self.busy -= 1
            return web.json_response({"error": "restarting"}, status=503)
        wrong = [word for word in map(int, body.get("logit_bias", {})) if word >= self.vocabulary]
        if wrong:
            text = f"token_id(s) {wrong} in logit_bias contain out-of-vocab token ids. Vocabulary size: 264"
            return web.json_response({"error": {"message": text}}, status=400)
        ids = body["prompt"]
        rows = [None, *({str(ids[i]): {"logprob": logprob(ids, i), "rank": 3}} for i in range(1, len(ids)))]
        return web.json_response(self.change({"choices": [{"index": 0, "text": "x", "prompt_logprobs": rows}]}))
