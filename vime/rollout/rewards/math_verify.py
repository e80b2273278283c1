"""math_verify: whether the expression that a response ends with equals the reference. Runs in a worker.

math_verify finds LaTeX only between dollars or in a box, and of several boxes makes a set; so the text of the answer is
cut out here, and given to it as one formula. Answers that are words are compared as words.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Literal

from vime.rollout.rewards.final_answer import boxes, plain, without_thinking

ALARM_SECONDS = 5
"""math_verify's own limit for parsing and for comparing."""
MAX_ANSWER = 2_000
"""Characters of an answer that are parsed. A longer one is no answer, and its parsing could take for ever."""
MAX_RESPONSE = 100_000
"""Characters, from the end, in which an answer outside a box is looked for."""

ReadAs = Literal["formula", "text", "nothing"]

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed")
_WORDS = re.compile(r"[^\W\d_]{3,}(?:[\s,;'\u2019-]+[^\W\d_]+)*")
_SPOKEN = re.compile(r"answer\s*(?:is|:|=)+\s*([^\n]{1,200})", re.IGNORECASE)
_BASE = re.compile(r"([0-9A-Za-z]+)_\{?\(?(\d{1,2})\)?\}?")
_EXPLOSIVE = re.compile(r"\^[-+(]*[\w.]+\^[-+(]*\w|\^[-+(]*\d{5}|\d{5}\)*!|!!|\^[-+(]*\d{2,}\)*!")
"""In a text without braces and blanks: a tower of powers, a power or a factorial with more digits than memory."""
_UNICODE = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f", " "),
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u00f7": r"\div ",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u2260": r"\ne ",
        "\u222a": r"\cup ",
        "\u2208": r"\in ",
        "\u00b0": r"^\circ ",
        "\u00b2": "^2",
        "\u00b3": "^3",
        "\u00bd": r"\frac12 ",
        "\u00bc": r"\frac14 ",
        "\u00be": r"\frac34 ",
        "\u2205": r"\emptyset ",
        "\u00b1": r"\pm ",
    }
)
"""Minus signs, blanks and symbols of Unicode as LaTeX writes them."""


def score(response: str, answer: str) -> float:
    """1.0 when the response's answer equals the reference, else 0.0.

    Its answer is the last box (\\boxed, \\fbox), else the last <answer>, else what math_verify finds; thinking does not
    count. Raises ValueError for a reference that is neither formula nor text.
    """
    kind = read_as(answer)
    if kind == "nothing":
        raise ValueError(f"math_verify finds no expression in the reference answer {answer!r}")
    text = without_thinking(response)
    wanted = _normal(answer)
    for given in _given(text):
        if _normal(given) == wanted and wanted:
            return 1.0
        if kind == "text":
            if _words(given) == _words(answer):
                return 1.0
        elif _equal(answer, given):
            return 1.0
    if _given(text):
        return 0.0
    if kind == "text":
        return float(_words(answer) in _said(text))
    if explosive(text[-300:]):
        return 0.0
    return float(_matches(_formula(answer), _parse(text[-MAX_RESPONSE:].translate(_UNICODE))))


def prepare() -> None:
    """Loads what scoring takes."""
    import math_verify  # noqa: F401

    read_as("$1$")


@functools.lru_cache(4096)
def read_as(answer: str) -> ReadAs:
    """How a reference answer is compared: as a formula, as words, or not at all."""
    if _WORDS.fullmatch(plain(answer)) and _is_text(answer):
        return "text"
    if _formula(answer):
        return "formula"
    return "text" if re.search(r"\w", answer) else "nothing"


def read_all(answers: list[str]) -> list[ReadAs]:
    """`read_as` of each."""
    return [read_as(answer) for answer in answers]


def _given(text: str) -> list[str]:
    """The answers that a response marks as such: the last box alone, and with those just before it."""
    run = boxes(text)
    if run:
        return [run[-1], ", ".join(run)] if len(run) > 1 else run
    tags = _TAG.findall(text[-MAX_RESPONSE:])
    return [tags[-1]] if tags else []


def explosive(text: str) -> bool:
    """Whether computing with the text could take for ever, as with 9^{9^{9}}."""
    return bool(_EXPLOSIVE.search(re.sub(r"[\s{}$]|\\[,;!]|\\(?:left|right)", "", text.replace("**", "^"))))


def _based(text: str) -> int | None:
    """The value of a number that names its base, such as 1011_2."""
    match = _BASE.fullmatch(re.sub(r"[\s$]|\\text|\\mathrm", "", text))
    try:
        return None if match is None else int(match[1], int(match[2]))
    except ValueError:
        return None


def _equal(answer: str, given: str) -> bool:
    if len(given) > MAX_ANSWER or explosive(given):
        return False
    wanted, found = _based(answer), _based(given)
    if wanted is not None and found is not None:
        return wanted == found
    return _matches(_formula(answer), _formula(given))


def _matches(gold: list[Any], found: list[Any]) -> bool:
    from math_verify import verify

    return bool(gold and found and verify(gold, found, timeout_seconds=ALARM_SECONDS))


@functools.lru_cache(4096)
def _formula(text: str) -> list[Any]:
    """A text as one formula; [] when it is none."""
    if len(text) > MAX_ANSWER:
        return []
    text = text.strip().translate(_UNICODE).replace(r"\$", "")
    found = _parse(text if _MARKED.search(text) else f"${text}$")
    return found if any(not isinstance(one, str) for one in found) else []


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, parsing_timeout=ALARM_SECONDS))


def _is_text(answer: str) -> bool:
    return "\\" not in plain(answer)


def _words(text: str) -> str:
    return " ".join(plain(text).casefold().split())


def _said(text: str) -> list[str]:
    """What a response without a box may be read to answer in words: the last line, and what follows "answer is"."""
    lines = text[-MAX_RESPONSE:].strip().splitlines()
    spoken = _SPOKEN.findall(text[-MAX_RESPONSE:])
    return [_words(one) for one in [*lines[-1:], *spoken[-1:]]]


def _normal(text: str) -> str:
    return re.sub(r"\s+|\\[,;! ]|^\$+|\$+$", "", text.translate(_UNICODE).strip()).strip("$.")
