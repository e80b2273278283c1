"""What a function of the user's returned, made plain where the object lives: in its worker, or in the generator.

Each is given to a call as `returns`, goes over to the worker with it, and gives what JSON can say.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from vime.errors import UserError


class NotUsable(Exception):
    """It is not what such a function has to return. The text goes on after the function's name."""


@dataclass(frozen=True)
class Reward:
    """A reward: a number, or a dict with the number under `key`."""

    name: str
    """The configuration's own words, such as data.reward=module:function."""
    key: str | None

    def __call__(self, value: Any) -> float | str:
        """The number, or why there is none. Raises UserError for what no other try would mend."""
        if isinstance(value, dict):
            found = ", ".join(sorted(map(str, value)))
            if self.key is None:
                raise UserError(f"{self.name} returns a dict ({found}): set data.reward_key to one of them")
            if self.key not in value:
                raise UserError(f"{self.name} returned a dict without data.reward_key={self.key!r}; it has {found}")
            value = value[self.key]
        if value is None:
            return f"{self.name} returned None"
        try:
            number = float(value)
        except Exception:  # noqa: BLE001 - an object of the user's, which may raise anything
            return f"{self.name} returned a {type(value).__name__}, not a number"
        return number if math.isfinite(number) else f"{self.name} returned {number}"


@dataclass(frozen=True)
class GroupRewards:
    """One reward for each of `count` responses."""

    one: Reward
    count: int

    def __call__(self, values: Any) -> list[float | str]:
        """As `Reward`, of each. Raises UserError for a list of another length."""
        if values is None:
            return [self.one(None)] * self.count
        if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__") or len(values) != self.count:
            raise UserError(f"{self.one.name} got {self.count} responses and must return as many rewards")
        return [self.one(value) for value in values]


def judgement(value: Any) -> bool:
    """Yes or no. Raises NotUsable."""
    try:
        return bool(value)
    except Exception as error:
        raise NotUsable(f"returned a {type(value).__name__}, neither yes nor no") from error


@dataclass(frozen=True)
class Judgements:
    """Yes or no for each of `count` groups."""

    name: str
    count: int

    def __call__(self, values: Any) -> list[bool]:
        """Raises UserError for a list of another length, NotUsable for an entry that is neither."""
        if not hasattr(values, "__len__") or len(values) != self.count:
            raise UserError(f"{self.name} got {self.count} groups and must judge each")
        return [judgement(value) for value in values]


@dataclass(frozen=True)
class TokenIds:
    """Token ids of a tokenizer of `size`."""

    size: int

    def __call__(self, given: Any) -> list[int] | None:
        """A list of them; None when it is something else."""
        try:
            ids = [operator.index(token) for token in given]
            return ids if all(0 <= token < self.size for token in ids) else None
        except Exception:  # noqa: BLE001 - an object of the user's, which may raise anything
            return None
