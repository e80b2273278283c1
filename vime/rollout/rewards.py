"""How a response is scored: the task's own scorer, math_verify, exact match, or a function of the user's.

A function of the user's is called with keyword arguments, of which it takes those that it names: `prompt` (text or
messages), `answer` (the reference), `record` (the source's own), and either `response` (one text: it scores a sample)
or `responses` (a list: it scores a group and returns a list). It may be async. A reward is a number, or a dict with the
number under `data.reward_key`, or None for "cannot say".
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from vime.config import Data
from vime.errors import UserError
from vime.import_path import load_function
from vime.rollout.math_score import MathScorer
from vime.rollout.problem import Problem
from vime.rollout.thread_call import call_in_thread

MATH_WORKERS = 2
OFFERED = ("prompt", "answer", "record")


class Unscored(Exception):
    """The reward function gave nothing for a response: it raised, took too long, or returned no finite number."""


class Scorer:
    """Scores the responses of a group. `close` ends what it started."""

    def __init__(self, data: Data, timeout: float) -> None:
        """Raises UserError when the scorer cannot be had."""
        self._data = data
        self._timeout = timeout
        self._math: MathScorer | None = None
        self._by_group = False
        self._function: Callable[..., Any]
        if data.reward == "task":
            self._function = _task_scorer(data)
        elif data.reward == "exact":
            self._function = _exact
        elif data.reward == "math_verify":
            self._math = MathScorer(MATH_WORKERS, timeout)
            self._function = self._score_math
        else:
            self._function = load_function(data.reward, "data.reward")
            self._by_group = "responses" in _parameters(self._function, data.reward)

    async def score(self, problem: Problem, responses: list[str]) -> list[float | Unscored]:
        """One reward, or the reason why there is none, for each response.

        A group scorer that fails leaves all of them unscored. Raises UserError for what no other try would mend: a dict
        without `data.reward_key`, a list of the wrong length.
        """
        if self._by_group:
            return await self._score_group(problem, responses)
        return list(await asyncio.gather(*(self._score_one(problem, response) for response in responses)))

    def close(self) -> None:
        """Ends the scorer's workers."""
        if self._math is not None:
            self._math.close()

    async def _score_one(self, problem: Problem, response: str) -> float | Unscored:
        try:
            value = await self._call(problem, response=response)
        except Unscored as reason:
            return reason
        return self._number(value)

    async def _score_group(self, problem: Problem, responses: list[str]) -> list[float | Unscored]:
        try:
            values = await self._call(problem, responses=responses)
        except Unscored as reason:
            return [reason] * len(responses)
        if values is None:
            return [Unscored("returned None")] * len(responses)
        if not isinstance(values, list | tuple) or len(values) != len(responses):
            raise UserError(
                f"data.reward={self._data.reward} got {len(responses)} responses and must return as many rewards"
            )
        return [self._number(value) for value in values]

    async def _call(self, problem: Problem, **response: Any) -> Any:
        offered = {"prompt": problem.prompt, "answer": problem.answer, "record": problem.record}
        if self._data.reward in ("task", "exact", "math_verify"):
            taken = offered
        else:
            names = _parameters(self._function, self._data.reward)
            taken = offered if None in names else {name: offered[name] for name in offered if name in names}
        call = partial(self._function, **taken, **response)
        try:
            if self._math is not None or inspect.iscoroutinefunction(self._function):
                return await asyncio.wait_for(call(), None if self._math is not None else self._timeout)
            if self._data.reward in ("task", "exact"):
                return call()  # microseconds: a thread would cost more
            return await call_in_thread(call, self._timeout)
        except UserError:
            raise
        except TimeoutError as error:
            raise Unscored(f"took more than rollout.reward_timeout={self._timeout:g} s") from error
        except Exception as error:
            raise Unscored(f"raised {type(error).__name__}: {error}") from error

    def _number(self, value: Any) -> float | Unscored:
        key = self._data.reward_key
        if isinstance(value, dict):
            found = ", ".join(sorted(map(str, value)))
            if key is None:
                raise UserError(
                    f"data.reward={self._data.reward} returns a dict ({found}): set data.reward_key to one of them"
                )
            if key not in value:
                raise UserError(
                    f"data.reward={self._data.reward} returned a dict without data.reward_key={key!r}; it has {found}"
                )
            value = value[key]
        if value is None:
            return Unscored("returned None")
        try:
            number = float(value)
        except (TypeError, ValueError):
            return Unscored(f"returned a {type(value).__name__}, not a number")
        return number if math.isfinite(number) else Unscored(f"returned {number}")

    def _score_math(self, response: str, answer: str, **rest: Any) -> Awaitable[float]:
        assert self._math is not None
        return self._math.score(response, answer)


def _exact(response: str, answer: str, **rest: Any) -> float:
    return float(response.strip() == answer.strip())


def _task_scorer(data: Data) -> Callable[..., Any]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(data.task, size=1, seed=0, **data.task_args)

    def score(response: str, record: dict[str, Any], **rest: Any) -> float:
        return float(dataset.score_answer(response.strip(), record))

    return score


def _parameters(function: Callable[..., Any], path: str) -> set[str | None]:
    """Names of the keyword arguments that `function` takes; None among them when it takes any."""
    parameters = inspect.signature(function).parameters.values()
    names: set[str | None] = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names.add(None)
    elif not names & {"response", "responses"}:
        raise UserError(f"data.reward={path} takes neither `response` nor `responses`")
    return names
