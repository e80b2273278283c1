"""The two errors that every part of vime shares."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something a person gave was wrong. Its text is one line: what, where, and the nearest right value.

    `launch.py` prints it and ends with exit code 2, before anything is submitted or written.
    """


class WaitTimeout(TimeoutError):
    """A bounded wait ran out. Its text names what was waited for and for how long."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` most likely meant, or None: a misspelling, or initials (`lr` for learning_rate)."""
    choices = list(choices)
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
