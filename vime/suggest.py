"""The nearest right word, for errors that teach."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
