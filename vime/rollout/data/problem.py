"""One prompt with what is needed to score an answer to it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """What a prompt source yields."""

    prompt: str | list[dict[str, Any]]
    """The prompt's text, or chat messages with `role` and `content`."""
    answer: str
    """The reference answer; empty when there is none."""
    record: dict[str, Any] = field(default_factory=dict)
    """The source's own record, handed on to scorers and formats."""
    where: str = field(default="", compare=False)
    """File and line, or what else names it to its owner; empty when nothing does."""

    @property
    def uid(self) -> str:
        """Identity of the prompt: a hash of what is asked, the same in every run and on every machine.

        Other problems may have the same prompt, so it tells held-out prompts from trained ones, not problems apart.
        """
        asked = self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()[:16]

    @property
    def identity(self) -> str:
        """A hash of all that a format or scorer sees: prompt, answer and record."""
        seen = [self.prompt, self.answer, _without_place(self.record)]
        try:
            text = json.dumps(seen, sort_keys=True, default=_described)
        except (TypeError, ValueError, RecursionError):  # a source of the user's may put anything into a record
            text = _described(seen)
        return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]

    def held_out(self, share: float) -> bool:
        """Whether it belongs to the `share` of all problems that is never trained on."""
        return int(self.uid, 16) < share * 2**64


_PLACE = ("source_dataset", "source_index")
"""What reasoning_gym's metadata says of where a problem was drawn, which is no part of the problem."""


def _described(value: object) -> str:
    """`repr` without addresses, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _without_place(record: dict[str, Any]) -> dict[str, Any]:
    metadata = record.get("metadata")
    if not isinstance(metadata, dict):
        return record
    return {**record, "metadata": {key: value for key, value in metadata.items() if key not in _PLACE}}
