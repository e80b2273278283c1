"""Reference answers that a scorer cannot compare with anything: found at the start, not one sample at a time."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence

from vime.config import Data
from vime.errors import UserError
from vime.rollout.data.problem import Problem
from vime.rollout.data.user_calls import UserCalls
from vime.rollout.rewards.rules import is_letter

SHOWN = 10
"""Of those that cannot be read, how many are named."""
SECONDS = 60.0
"""For one reference."""
_NUMBER = re.compile(r"-?\d{1,300}(?:\.\d{1,300})?")


async def check_references(
    data: Data, problems: Sequence[Problem], calls: UserCalls, report: Callable[..., None], name: str
) -> None:
    """Reads all references of `problems` once, in the workers that score, where the scorer has to understand them.

    Those that cannot be read are reported and said on stderr with the lines that they are from. `name`: of the data.
    Raises UserError when none can.
    """
    if data.reward not in ("math_verify", "choice") or not problems:
        return
    unread = await _unread(data.reward, {problem.answer for problem in problems}, calls)
    bad = [problem for problem in problems if problem.answer in unread]
    if not bad:
        return
    shown = [f"{problem.where or f'prompt {problem.uid}'} ({problem.answer[:60]!r})" for problem in bad[:SHOWN]]
    text = (
        f"{name}: data.reward={data.reward} cannot read {len(bad)} of {len(problems)} reference answers:"
        f" {', '.join(shown)}{' ...' if len(bad) > SHOWN else ''}"
    )
    if len(bad) == len(problems):
        raise UserError(text)
    print(f"{text}; their samples stay unscored", file=sys.stderr, flush=True)
    report("references_unread", dataset=name, unread=len(bad), references=len(problems), shown=shown)


async def _unread(reward: str, answers: set[str], calls: UserCalls) -> set[str]:
    if reward == "choice":
        return {answer for answer in answers if not is_letter(answer)}
    asked = sorted(answer for answer in answers if not _NUMBER.fullmatch(answer))
    outcomes = await calls.scoring.map(
        "vime.rollout.rewards.math_verify:read_as", {}, [{"answer": answer} for answer in asked], SECONDS
    )
    pairs = zip(asked, outcomes, strict=True)
    return {answer for answer, (read, failed) in pairs if failed is not None or read == "nothing"}
