"""The order in which problems are asked: shuffled anew in each epoch, and resumable from a small cursor."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from vime.errors import UserError
from vime.rollout.problem import Problem


class PromptStream:
    """An endless stream over `problems`.

    The order of an epoch depends on the seed and the epoch alone, so that a stream resumed from a cursor goes on as the
    uninterrupted one would have.
    """

    def __init__(
        self, problems: tuple[Problem, ...], seed: int, shuffle: bool, cursor: Mapping[str, Any] | None = None
    ) -> None:
        """`cursor` is what `cursor()` of an earlier stream gave; None or {} starts at the beginning."""
        self._problems = problems
        self._seed = seed
        self._shuffle = shuffle
        self._epoch, self._position = _read_cursor(cursor or {"epoch": 0, "position": 0}, len(problems))
        self._order = self._epoch_order()

    def take(self) -> tuple[int, Problem]:
        """The next problem and its index in the stream (from 0, over all epochs)."""
        if self._position == len(self._problems):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order()
        index = self._epoch * len(self._problems) + self._position
        problem = self._problems[self._order[self._position]]
        self._position += 1
        return index, problem

    def cursor(self) -> dict[str, int]:
        """Where the stream stands, as JSON."""
        return {"epoch": self._epoch, "position": self._position}

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self._problems)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order


def _read_cursor(cursor: Mapping[str, Any], problems: int) -> tuple[int, int]:
    epoch, position = cursor.get("epoch"), cursor.get("position")
    if not isinstance(epoch, int) or not isinstance(position, int) or epoch < 0 or not 0 <= position <= problems:
        raise UserError(
            f"the prompt cursor {dict(cursor)} does not fit {problems} problems:"
            " was the data changed since the checkpoint?"
        )
    return epoch, position
