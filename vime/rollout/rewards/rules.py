"""Scorers that come with vime, for answers that a rule can judge, in time that grows with the text's length alone."""

from __future__ import annotations

import re

from vime.rollout.rewards.final_answer import boxes, plain, without_thinking

MAX_READ = 20_000
"""Characters, from the end of a response, in which a letter is looked for."""

_OPENING = r"[\s*_:=$(\[\"'{,>\u2013-]*(?:\\(?:text|textbf|textit|mathrm|mathbf|boxed|left)\s*\{?[\s(*]*)*"
_FILLER = (
    r"(?:is|was|be|would|should|must|choice|option|letter|the|correct|right|best|final|therefore|thus|probably"
    r"|i\s+think|i\s+believe)"
)
_ENDS = r"(?![A-Za-z0-9'\u2019])"
# A letter, and not the "I" of "I think", nor the first of several that are offered together.
_LETTER = rf"(?!I\s+[a-z])([A-Z]){_ENDS}(?![\s)\]*$}}.]*(?:,|/|\||&|\bor\b|\band\b)\s*[(\[*$]*[A-Z]{_ENDS})"
ANSWER = re.compile(
    rf"(?i:\banswer\b){_OPENING}(?:(?i:{_FILLER}\b){_OPENING})*{_LETTER}"
    r"|(?<![\w'\u2019])([A-Z])[)\]*\"']*\s+is\s+(?:the\s+)?(?:correct|right|best)?\s*(?i:answer|correct|right)\b"
)
"""The answer is (B), **Answer:** B, B is the answer."""
OPTION = re.compile(rf"(?i:\b(?:choice|option)\b){_OPENING}(?:(?i:{_FILLER}\b){_OPENING})*{_LETTER}")
LONE = re.compile(r"""[*_(\["'$\s]*([A-Z])[*_)\]"'$.:,\s]*""")
"""A letter and nothing else but brackets and punctuation."""
LETTERED = re.compile(r"""[*_"'$\s]*(?:[(\[]([A-Z])[)\]]|([A-Z])[).:])[*_]*\s+\S.*""")
"""(B) twelve"""


def exact(response: str, answer: str) -> float:
    """1.0 when response and reference are the same text but for white space around them."""
    return float(response.strip() == answer.strip())


def is_letter(answer: str) -> bool:
    """Whether a reference answer is one letter, such as "B" or "(B)"."""
    return LONE.fullmatch(plain(answer)) is not None


def choice(response: str, answer: str) -> float:
    """1.0 when the letter that the response settles on is the reference's, such as "B" or "(B)".

    Raises ValueError for a reference that is no letter.
    """
    wanted = LONE.fullmatch(plain(answer))
    if wanted is None:
        raise ValueError(f"the reference answer {answer!r} is not one letter")
    return float(chosen_letter(response) == wanted[1])


def chosen_letter(response: str) -> str | None:
    """The letter that a response settles on, or None. Thinking is left out.

    The last box with a letter counts; without any, the letter that was last said to be the answer, then the choice or
    option; then a last line that is one letter, or begins with one as "(B) twelve" does and is no list of the options.
    """
    text = without_thinking(response)[-MAX_READ:]
    run = boxes(text)
    if run:
        boxed = plain(run[-1])
        found = LONE.fullmatch(boxed) or LETTERED.fullmatch(boxed)
        if found:
            return found[1] or found[2] if found.re is LETTERED else found[1]
    for pattern in (ANSWER, OPTION):
        said = list(pattern.finditer(text))
        if said:
            return next(letter for letter in said[-1].groups() if letter)
    return _last_line(text)


def _last_line(text: str) -> str | None:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    alone = LONE.fullmatch(lines[-1])
    if alone:
        return alone[1]
    lettered = [LETTERED.fullmatch(line) for line in lines]
    letters = {match[1] or match[2] for match in lettered if match}
    return letters.pop() if lettered[-1] and len(letters) == 1 else None


def think_format(response: str) -> float:
    """1.0 when the response is one <think>...</think> block and then an answer, and nothing else."""
    text = response.strip()
    if not text.startswith("<think>"):
        return 0.0
    inner, end, answer = text.removeprefix("<think>").partition("</think>")
    return float(bool(end and answer.strip()) and not any(tag in inner + answer for tag in ("<think>", "</think>")))
