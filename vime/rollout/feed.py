"""Prompts ready to be asked: drawn from the stream, rendered to token ids, short enough to leave room for an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vime.errors import UserError
from vime.rollout.format import Format
from vime.rollout.limits import Limits
from vime.rollout.problem import Problem
from vime.rollout.prompts import PromptStream


@dataclass(frozen=True)
class Prompt:
    """One problem of the stream as token ids."""

    index: int
    """Position in the stream."""
    problem: Problem
    token_ids: list[int]
    max_tokens: int
    """Longest response that still fits, at least 1."""


class PromptFeed:
    """Draws from `problems` in the order of a `PromptStream`, without prompts that fill the context by themselves."""

    def __init__(
        self,
        problems: tuple[Problem, ...],
        seed: int,
        shuffle: bool,
        render: Format,
        limits: Limits,
        cursor: Mapping[str, Any] | None = None,
    ) -> None:
        self._stream = PromptStream(problems, seed, shuffle, cursor)
        self._count = len(problems)
        self._render = render
        self._limits = limits
        self.filtered = 0
        """Prompts left out so far because they were too long."""

    def take(self) -> Prompt:
        """The next prompt. Raises UserError when a whole epoch has none that is short enough."""
        for _ in range(self._count):
            index, problem = self._stream.take()
            prompt = fit(index, problem, self._render, self._limits)
            if prompt is not None:
                return prompt
            self.filtered += 1
        raise UserError(
            f"none of the {self._count} prompts leaves room for a response"
            f" in rollout.context={self._limits.context} tokens"
        )

    def cursor(self) -> dict[str, int]:
        """Where the stream stands, as JSON."""
        return self._stream.cursor()


def fit(index: int, problem: Problem, render: Format, limits: Limits) -> Prompt | None:
    """The prompt, or None when it is so long that not one token of a response would fit."""
    token_ids = render(problem)
    room = limits.room(len(token_ids))
    return Prompt(index, problem, token_ids, room) if room > 0 else None
