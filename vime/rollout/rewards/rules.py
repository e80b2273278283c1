"""Scorers that come with vime, for answers that a rule can judge. Code is not executed: that needs a sandbox."""

from __future__ import annotations

import re

CHOICE = re.compile(
    r"""(?:\\boxed\s*\{\s*(?:\\text\s*\{\s*)?  # \boxed{B}, \boxed{\text{B}}
        |\b(?:answer|choice|option)\b\s*(?:is|:|=)?\s*[*(\["']*  # the answer is (B), Answer: **B**
    )([A-Z])\b(?![\w'])""",
    re.VERBOSE,
)
LONE = re.compile(r"""[*(\["'\s]*([A-Z])[*)\]"'.:,\s]*""")
"""A letter and nothing else but brackets and punctuation."""
FORMAT = re.compile(r"\s*<think>(?P<think>.*?)</think>\s*(?P<answer>\S.*?)\s*", re.DOTALL)


def exact(response: str, answer: str) -> float:
    """1.0 when response and reference are the same text but for white space around them."""
    return float(response.strip() == answer.strip())


def choice(response: str, answer: str) -> float:
    """1.0 when the letter that the response settles on is the reference's, such as "B" or "(B)".

    It settles on the last one that is boxed or follows "answer", "choice" or "option"; without any, on a line at the
    end that is one letter. Raises ValueError for a reference that is no letter.
    """
    wanted = LONE.fullmatch(answer)
    if wanted is None:
        raise ValueError(f"the reference answer {answer!r} is not one letter")
    return float(chosen_letter(response) == wanted[1])


def chosen_letter(response: str) -> str | None:
    """The letter that a response settles on, or None."""
    # "The answer" and "the Answer" alike; but the letter itself must be upper case: "the answer is a ..." is prose.
    found = list(CHOICE.finditer(re.sub(r"(?i)\b(answer|choice|option)\b", lambda m: m[0].lower(), response)))
    if found:
        return found[-1][1]
    lines = response.strip().splitlines()
    alone = LONE.fullmatch(lines[-1]) if lines else None
    return alone[1] if alone else None


def think_format(response: str) -> float:
    """1.0 when the response is one <think>...</think> block and then an answer, and nothing else."""
    match = FORMAT.fullmatch(response)
    return float(match is not None and not re.search(r"</?think>", match["think"] + match["answer"]))
