"""Which part of a response is its answer: behind the thinking, in the last box, without marks around it."""

from __future__ import annotations

import re

MAX_BOX = 4_000
"""Characters of one box; what is longer has no end."""
MAX_BOXES = 8

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+(-?\w+)")
_BETWEEN = re.compile(r"(?:[\s$,;.]|\\[\[\]()]|\b(?:and|or)\b|\\text\s*\{\s*(?:and|or)\s*\})*")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_MARKS = re.compile(r"\\[()\[\],;! ]|\\(?:left|right)(?![a-zA-Z])|[$*`\"“”]")


def without_thinking(response: str) -> str:
    """What follows the thinking, if there is any."""
    return response.rpartition("</think>")[2]


def boxes(text: str) -> list[str]:
    """What the last boxes of a text hold: the last one, after those with nothing but a comma or "and" up to it."""
    found: list[tuple[int, int, str]] = []
    openings = [*_BOX.finditer(text)][-MAX_BOXES:]
    for opening in openings:
        end = _closing(text, opening.end())
        if end is not None and not (found and opening.start() < found[-1][1]):
            found.append((opening.start(), end, text[opening.end() : end - 1]))
    found += [(bare.start(), bare.end(), bare[1]) for bare in [*_BARE_BOX.finditer(text)][-MAX_BOXES:]]
    run: list[str] = []
    begin = 0
    for start, end, content in sorted(found, reverse=True):
        if run and not _BETWEEN.fullmatch(text, end, begin):
            break
        run.insert(0, content)
        begin = start
    return run


def plain(text: str) -> str:
    """A text without the dollars, boxes and text commands around what it says."""
    text = re.sub(r"\\(?:boxed|fbox)\s*\{(.*)\}", r"\1", text.strip(), flags=re.DOTALL)
    text = _TEXT_COMMAND.sub(r" \1 ", _TEXT_COMMAND.sub(r" \1 ", text))
    return _MARKS.sub(" ", text).strip(" \t\n.,;:!{}~")


def _closing(text: str, start: int) -> int | None:
    """The place behind the brace that ends what begins at `start`."""
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start, start + MAX_BOX):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return brace.end()
    return None
