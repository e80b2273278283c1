"""One response in the making, turn by turn: what a custom `rollout.generate` works on.

The token ids are carried from turn to turn and never made from text again: each turn's request is the ids of the one
before, the ids that were sampled, and what was appended, so that what is trained on is what was sampled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vime.errors import UserError
from vime.rollout.client import Completion
from vime.rollout.data.format import Turns
from vime.rollout.data.problem import Problem
from vime.rollout.routes import Routes, routes_of_turns

Ask = Callable[[list[int], int, tuple[int, ...], tuple[str, ...]], Coroutine[Any, Any, Completion]]
"""(token ids, most tokens, further stop token ids, stop texts) -> what the engine sampled."""


MAX_STOPS = 4
"""Texts at which vLLM's completions may end."""


class EpisodeEnded(Exception):
    """There is no room for another token: the sample ends here, as truncated. Not to be caught by a generate."""


@dataclass(frozen=True)
class Turn:
    """What one request sampled."""

    text: str
    """Without the token that ended it and without special tokens."""
    token_ids: tuple[int, ...]
    """As sampled, the token that ended it included."""
    truncated: bool
    """It ended because there was no room for more."""


@dataclass(frozen=True, eq=False)
class Draft:
    """A response before it is scored. R response tokens."""

    response: NDArray[np.int32]
    """[R]"""
    loss_mask: NDArray[np.uint8]
    """[R] 1: sampled; 0: appended by a tool or a template."""
    logprobs: NDArray[np.float32]
    """[R] 0 where the mask is."""
    versions: NDArray[np.int32]
    """[K, 2] as in `Sample`."""
    truncated: bool
    text: str
    """What a scorer sees: the last turn."""
    metadata: dict[str, Any]
    routes: Routes | None = None
    """Of prompt and response, where they are asked for."""


class Episode:
    """The conversation so far. `problem` has the prompt, the reference answer and the source's record.

    `metadata` is a dict of JSON values that a reward is given and the sample keeps.
    """

    def __init__(
        self, problem: Problem, prompt: Sequence[int], room: int, ask: Ask, tokenizer: Any, turns: Turns
    ) -> None:
        """room: most response tokens, appended ones included."""
        self.problem = problem
        self.tokenizer = tokenizer
        self.metadata: dict[str, Any] = {}
        self._prompt = list(prompt)
        self._room = room
        self._ask = ask
        self._turns = turns
        self._parts: list[tuple[NDArray[np.int32], Completion | None]] = []
        self._truncated = False
        self._text = ""

    @property
    def token_ids(self) -> list[int]:
        """A copy of the ids so far: prompt, turns and what was appended."""
        return [*self._prompt, *(int(token) for ids, _ in self._parts for token in ids)]

    @property
    def room(self) -> int:
        """How many more tokens there may be."""
        return self._room - sum(len(ids) for ids, _ in self._parts)

    async def sample(
        self, max_tokens: int | None = None, stop: Sequence[str] = (), stop_token_ids: Sequence[int] = ()
    ) -> Turn:
        """Let the policy go on. It ends at its own end token, at one of `stop_token_ids`, after a text of `stop` (which
        stays), or after `max_tokens`.

        Raises EpisodeEnded when nothing fits any more; leave it to vime. Raises ValueError for more than MOST_STOPS
        texts.
        """
        if len(stop) > MAX_STOPS:
            raise ValueError(f"a turn may end at {MAX_STOPS} texts, not at {len(stop)}; use stop_token_ids for more")
        self._require(1)
        most = min(self.room, max_tokens or self.room)
        completion = await self._ask(self.token_ids, most, tuple(stop_token_ids), tuple(stop))
        self._parts.append((completion.token_ids, completion))
        self._truncated = completion.finish_reason == "length" and self.room == 0
        ids = completion.token_ids.tolist()
        self._text = self._turns.text(ids, stop_token_ids)
        return Turn(self._text, tuple(ids), completion.finish_reason == "length")

    def append(self, text: str) -> None:
        """Append what a tool says. Its tokens are made from this text alone and are not trained on."""
        self.append_ids(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def append_ids(self, token_ids: Sequence[int]) -> None:
        """Append tokens that are not trained on; the sample has them only if something is sampled behind them.

        Raises EpisodeEnded when they leave no room to sample.
        """
        if not self._parts:
            raise UserError("a generate must sample before it appends: what comes first belongs to the prompt")
        self._require(len(token_ids) + 1)
        if len(token_ids):
            self._parts.append((np.asarray(token_ids, np.int32), None))

    def append_messages(self, messages: list[dict[str, Any]]) -> None:
        """Append messages, such as a tool's, as the chat template writes them after an answer, and the opening of the
        next one."""
        self.append_ids(self._turns.following(messages))

    def _require(self, tokens: int) -> None:
        if self.room < tokens:
            self._truncated = True
            raise EpisodeEnded

    def _plain_metadata(self) -> dict[str, Any]:
        """A copy that only the sample has. Raises ValueError naming the key that is not JSON."""
        plain: dict[str, Any] = {}
        for key, value in self.metadata.items():
            try:
                plain |= json.loads(json.dumps({key: value}, allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"its metadata[{key!r}] is not JSON: {error}") from error
        return plain

    def draft(self) -> Draft:
        """The response as it stands. Raises ValueError when nothing was sampled or the metadata are not JSON."""
        if not self._parts:
            raise ValueError("it sampled nothing")
        while self._parts[-1][1] is None:
            self._parts.pop()  # nothing was sampled behind it
        metadata = self._plain_metadata()
        masks, logprobs, rows = [], [], []
        start = 0
        for ids, completion in self._parts:
            masks.append(np.full(len(ids), completion is not None, np.uint8))
            if completion is None:
                logprobs.append(np.zeros(len(ids), np.float32))
            else:
                logprobs.append(completion.logprobs)
                rows.append(completion.versions + np.array([start, 0], np.int32))
            start += len(ids)
        versions = np.concatenate(rows)
        changed = np.append(True, versions[1:, 1] != versions[:-1, 1])  # a row that repeats the version says nothing
        return Draft(
            response=np.concatenate([ids for ids, _ in self._parts]),
            loss_mask=np.concatenate(masks),
            logprobs=np.concatenate(logprobs),
            versions=versions[changed],
            truncated=self._truncated,
            text=self._text,
            metadata=metadata,
            routes=routes_of_turns([completion.routes for _, completion in self._parts if completion is not None]),
        )


def ask_from_another_loop(ask: Ask, loop: asyncio.AbstractEventLoop) -> Ask:
    """`ask`, which belongs to `loop`, for a generate that runs in the loop of the user's functions."""

    async def bridged(ids: list[int], most: int, ends: tuple[int, ...], stop: tuple[str, ...]) -> Completion:
        call = asyncio.run_coroutine_threadsafe(ask(ids, most, ends, stop), loop)
        return await asyncio.wrap_future(call)

    return bridged
