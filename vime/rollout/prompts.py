"""The order in which problems are asked: shuffled anew in each epoch, and resumable from a small cursor."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime.config import Rollout
from vime.errors import UserError
from vime.rollout.data.fingerprint import Fingerprint, changes
from vime.rollout.data.format import Format, FormatFailed
from vime.rollout.data.problem import Problem
from vime.rollout.limits import Limits


class PromptStream:
    """An endless stream over `problems`.

    The order of an epoch depends on the seed and the epoch alone, so that a stream resumed from a cursor goes on as the
    uninterrupted one would have.
    """

    def __init__(
        self,
        problems: tuple[Problem, ...],
        seed: int,
        shuffle: bool,
        cursor: Mapping[str, Any] | None = None,
        data: Fingerprint | None = None,
        allow_change: bool = False,
    ) -> None:
        """`cursor` is what `cursor()` of an earlier stream gave; None or {} starts at the beginning.

        data: what the cursors of this stream belong to. Raises UserError for a cursor of other data; with
        `allow_change` the stream goes on with a new epoch of these instead.
        """
        self._problems = problems
        self._seed = seed
        self._shuffle = shuffle
        self._data = data
        self.changes: list[str] = []
        """What of the data is not as it was when the cursor was made."""
        self._epoch, self._position, self._offset = self._start(cursor or {"epoch": 0, "position": 0}, allow_change)
        self._order = self._epoch_order()

    def take(self) -> tuple[int, Problem]:
        """The next problem and its index in the stream (from 0, over all epochs)."""
        if self._position == len(self._problems):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order()
        index = self._offset + self._epoch * len(self._problems) + self._position
        problem = self._problems[self._order[self._position]]
        self._position += 1
        return index, problem

    def cursor(self) -> dict[str, Any]:
        """Where the stream stands, as JSON."""
        offset = {"offset": self._offset} if self._offset else {}
        data = {"data": self._data} if self._data is not None else {}
        return {"epoch": self._epoch, "position": self._position, **offset, **data}

    def _start(self, cursor: Mapping[str, Any], allow_change: bool) -> tuple[int, int, int]:
        """Epoch, position in it, and what to add to their index so that indices go on from the cursor's."""
        saved = cursor.get("data")
        if isinstance(saved, dict) and self._data is not None:
            self.changes = changes(saved, self._data)
        if not self.changes:
            return _read_cursor(cursor, len(self._problems))
        if not allow_change:
            raise UserError(changed_line(self.changes))
        assert isinstance(saved, dict)
        count = saved["problems"]
        epoch, position, offset = _read_cursor(cursor, count)
        index = offset + epoch * count + position
        return epoch + 1, 0, index - (epoch + 1) * len(self._problems)

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self._problems)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order


def changed_line(changes: Sequence[str]) -> str:
    """Why a run whose data changed does not go on, and how it would."""
    return (
        f"the data changed since the checkpoint: {', '.join(changes)}. The prompt order cannot go on where it was: put"
        " the data back, or go on with a new epoch of what there is now by data.allow_change=true"
    )


def _read_cursor(cursor: Mapping[str, Any], problems: int) -> tuple[int, int, int]:
    epoch: Any = cursor.get("epoch")
    position: Any = cursor.get("position")
    offset: Any = cursor.get("offset", 0)
    if (
        (isinstance(epoch, int) and isinstance(position, int) and isinstance(offset, int))
        and epoch >= 0
        and 0 <= position <= problems
    ):
        return epoch, position, offset
    shown = {key: value for key, value in cursor.items() if key != "data"}
    raise UserError(
        f"the prompt cursor {shown} does not fit {problems} problems: was the data changed since the checkpoint?"
    )


Report = Callable[..., None]
"""Called with an event's name and its fields."""


@dataclass(frozen=True)
class Prompt:
    """One problem of the stream as token ids."""

    index: int
    """Position in the stream."""
    problem: Problem
    token_ids: list[int]
    """Empty when an earlier attempt has written its group."""
    max_tokens: int
    """Longest response that still fits, at least 1."""


class PromptFeed:
    """Draws from `problems` in the order of a `PromptStream`, without prompts that fill the context by themselves and
    those that `data.format` fails on."""

    def __init__(
        self,
        problems: tuple[Problem, ...],
        seed: int,
        shuffle: bool,
        render: Format,
        limits: Limits,
        rollout: Rollout,
        report: Report,
        cursor: Mapping[str, Any] | None = None,
        written: frozenset[int] = frozenset(),
        data: Fingerprint | None = None,
        allow_change: bool = False,
    ) -> None:
        """`data`, `allow_change`: as in `PromptStream`; a change is reported.

        `written`: stream positions whose group an earlier attempt has written. They come without token ids; what
        lies between them was left out, lost or filtered out then, and does not come again."""
        self._stream = PromptStream(problems, seed, shuffle, cursor, data, allow_change)
        if self._stream.changes:
            report("data_changed", changes=self._stream.changes)
        self._count = len(problems)
        self._render = render
        self._limits = limits
        self._rollout = rollout
        self._report = report
        self._written = written
        self._behind = max(written, default=-1)
        self.filtered = 0
        """Prompts left out so far because they were too long."""
        self.dropped = 0
        """Samples not asked for so far because `data.format` failed on their prompt."""

    async def take(self) -> Prompt:
        """The next prompt.

        Raises UserError when a whole epoch has none, or `data.format` fails on as many in a row as a step may lose.
        """
        most = self._rollout.prompts_per_step * self._rollout.tries
        too_long, failed = 0, 0
        while too_long + failed < self._count:
            index, problem = self._stream.take()
            if index in self._written:
                return Prompt(index, problem, [], 0)
            if index < self._behind:
                continue
            try:
                prompt = await fit(index, problem, self._render, self._limits)
            except FormatFailed as error:
                failed += 1
                self._drop(index, error.reason)
                if failed == min(most, self._count):
                    raise UserError(f"{failed} prompts in a row could not be made, at last: {error}") from error
                continue
            if prompt is not None:
                return prompt
            too_long += 1
            self.filtered += 1
        raise UserError(
            f"none of the {self._count - failed} prompts leaves room for a response"
            f" in rollout.context={self._limits.context} tokens"
        )

    def _drop(self, index: int, reason: str) -> None:
        samples = self._rollout.samples_per_prompt
        self.dropped += samples
        self._report("sample_dropped", prompt=index, samples=samples, tries=self._rollout.tries, reasons=[reason])

    def cursor(self) -> dict[str, Any]:
        """Where the stream stands, as JSON."""
        return self._stream.cursor()


async def fit(index: int, problem: Problem, render: Format, limits: Limits) -> Prompt | None:
    """The prompt, or None when it is so long that not one token of a response would fit. Raises as `render` does."""
    token_ids = await render(problem)
    room = limits.room(len(token_ids))
    return Prompt(index, problem, token_ids, room) if room > 0 else None
