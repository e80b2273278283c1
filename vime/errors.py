"""The two errors that every part of vime shares."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """Something a person gave was wrong. Its text is one line: what, where, and the nearest right value.

    `launch.py` prints it and ends with exit code 2, before anything is submitted or written. What a person gave may
    stand in it, so control characters are shown as escapes, and a text without end is cut.
    """

    def __str__(self) -> str:
        return one_line(super().__str__())


MAX_LINE = 2000
"""Characters of an error's line."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: str) -> str:
    """`text` as one printable line of at most MAX_LINE characters; the middle of a longer one is left out."""
    if len(text) > MAX_LINE:
        half = MAX_LINE // 2 - 10
        text = f"{text[:half]} [...] {text[-half:]}"
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class WaitTimeout(TimeoutError):
    """A bounded wait ran out. Its text names what was waited for and for how long."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` most likely meant, or None: a misspelling, or initials (`lr` for learning_rate)."""
    word, choices = word[:100], list(choices)
    close = difflib.get_close_matches(word.lower().replace("-", "_"), choices, n=1, cutoff=0.6)
    if close:
        return close[0]
    initials = [choice for choice in choices if "".join(part[:1] for part in choice.split("_")) == word.lower()]
    return initials[0] if len(word) > 1 and len(initials) == 1 else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean X?`, or the whole list when it is short, or nothing."""
    choices = list(choices)
    found = nearest(word, choices)
    if found is not None:
        return f"; did you mean {found}?"
    return f"; there are: {', '.join(choices)}" if 0 < len(choices) <= 16 else ""


class ControlLost(ConnectionError):
    """The store of the run does not answer any more: the supervisor that hosts it has ended."""


class BadMessage(Exception):
    """A value in the store is not of the shape that its key promises."""


class Unsigned(BadMessage):
    """A value in the store was not written by this run: it is not signed with the run's token for its key."""


class BufferFault(Exception):
    """A file of the buffer cannot be written, or is not what was committed. The message names the file."""
