"""A teacher that is a server: the logprob that it gives each response token of a finished sample."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vime.buffer.sample import Group, Sample
from vime.config.algorithm import TEACHER_KEY
from vime.errors import UserError, WaitTimeout
from vime.run.http_client import BadResponse, RequestRefused, RetryingClient

CHECK_PATIENCE = 30.0
"""Seconds in which the server must answer before the run begins. Later it may be away longer, to be restarted."""
IMPOSSIBLE = -9999.0
"""What vLLM's server writes for a logprob of minus infinity, which JSON has not."""
ROUNDING = 1e-3
"""A logprob may be above 0 by this much."""


class Teacher(RetryingClient):
    """Asks the vLLM server at `url`, which may end in /v1. Use as an async context manager.

    vLLM's logprobs of prompt tokens are those of the model's own distribution: no temperature is applied to them,
    whatever a request says and in each --logprobs-mode. Every UserError is a line that names the key and the URL.
    """

    def __init__(self, url: str, request_timeout: float, patience: float, concurrency: int) -> None:
        """concurrency: samples that it is asked about at once, so that its time limit counts work and not waiting."""
        key = os.environ.get(TEACHER_KEY, "").strip()
        super().__init__({"Authorization": f"Bearer {key}"} if key else {}, request_timeout, patience, trust_env=True)
        self._name = f"algorithm.teacher={url}"
        root = url.rstrip("/").removesuffix("/v1")
        self._models, self._completions = f"{root}/v1/models", f"{root}/v1/completions"
        self._model = ""
        self._slots = asyncio.Semaphore(concurrency)

    async def check(self, vocabulary_size: int, context: int) -> None:
        """Prove that it can judge samples of at most `context` tokens, of a policy with that vocabulary.

        Call it first. Raises UserError when it cannot.
        """
        with self._naming():
            _, listed = await self.ask(self._models, patience=CHECK_PATIENCE)
        models = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
            raise UserError(f"{self._name} is no vLLM server: its /v1/models lists no model")
        self._model = str(models[0]["id"])
        longest = models[0].get("max_model_len")
        # A request has room for one sampled token, though nobody wants it.
        if isinstance(longest, int) and longest <= context:
            raise UserError(
                f"{self._name} takes at most {longest} tokens, and needs one more than a sample's {context}: serve it"
                f" with --max-model-len {context + 1}, or set rollout.context={longest - 1}"
            )
        await self._logprobs([0, 1], np.array([1]), CHECK_PATIENCE)
        for token, known, size in ((vocabulary_size - 1, True, "smaller"), (vocabulary_size, False, "larger")):
            if await self._knows(token) != known:
                raise UserError(
                    f"{self._name} has a {size} vocabulary than the policy's {vocabulary_size} tokens: their logprobs"
                    " cannot be compared"
                )

    async def judge(self, group: Group) -> Group:
        """The group with `teacher_logprobs`. Raises UserError when the server does not give them."""
        samples = await asyncio.gather(*(self._judge(sample) for sample in group.samples))
        return replace(group, samples=tuple(samples))

    async def _judge(self, sample: Sample) -> Sample:
        logprobs = np.zeros(sample.response_length, np.float32)
        kept = np.flatnonzero(sample.loss_mask)
        if len(kept):
            async with self._slots:
                logprobs[kept] = await self._logprobs(sample.token_ids.tolist(), sample.prompt_length + kept)
        return replace(sample, teacher_logprobs=logprobs)

    async def _logprobs(
        self, token_ids: list[int], positions: NDArray[np.int64], patience: float | None = None
    ) -> list[float]:
        body = {
            "model": self._model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        with self._naming():
            _, answer = await self.ask(self._completions, body, patience)
            return read_prompt_logprobs(answer, token_ids, positions.tolist())

    async def _knows(self, token: int) -> bool:
        # vLLM compares the tokens of a bias with the rows of the model's output, and computes nothing with a wrong one.
        body = {"model": self._model, "prompt": [0], "max_tokens": 1, "logit_bias": {str(token): 0}}
        with self._naming():
            try:
                await self.ask(self._completions, body, CHECK_PATIENCE)
            except RequestRefused as error:
                if "vocab" not in str(error):
                    raise
                return False
        return True

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except (BadResponse, RequestRefused, WaitTimeout) as error:
            unknown = isinstance(error, RequestRefused) and error.status in (401, 403)
            hint = f"; its API key belongs into the environment's {TEACHER_KEY}" if unknown else ""
            raise UserError(" ".join(f"{self._name}: {error}{hint}".split())) from error


def read_prompt_logprobs(answer: Any, token_ids: list[int], positions: list[int]) -> list[float]:
    """Checks an answer of /v1/completions and takes the logprob of the prompt token at each position out of it.

    Raises BadResponse naming what is wrong: logprobs that are missing, too few, of other tokens or no logprobs.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    rows = first.get("prompt_logprobs") if isinstance(first, dict) else None
    if not isinstance(rows, list):
        raise BadResponse("its answer has no prompt_logprobs, as a vLLM server gives them")
    if len(rows) != len(token_ids):
        raise BadResponse(f"it gave the logprobs of {len(rows)} tokens, {len(token_ids)} were sent")
    values = []
    for position in positions:
        token = token_ids[position]
        entry = rows[position].get(str(token)) if isinstance(rows[position], dict) else None
        value = entry.get("logprob") if isinstance(entry, dict) else None
        if not isinstance(value, int | float):
            raise BadResponse(f"it gave no logprob of token {position}, which is {token}")
        if not math.isfinite(value) or value <= IMPOSSIBLE:
            raise BadResponse(f"the logprob of token {position}, which is {token}, is not finite: {value}")
        if value > ROUNDING:
            raise BadResponse(
                f"the logprob of token {position} is {value}, above 0: these are logits; serve without --logprobs-mode"
            )
        values.append(float(value))
    return values
