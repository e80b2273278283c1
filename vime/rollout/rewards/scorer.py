"""How a response is scored: by the task's own scorer, a rule, another server, or a function of the user's.

A function of the user's is called with keyword arguments, of which it takes those that it names: `prompt` (text or
messages), `answer` (the reference), `record` (the source's own), and either `response` (one text: it scores a sample)
with its `metadata` (what a custom generate left), or `responses` (a list: it scores a group and returns a list) with
`metadatas`. It may be async. A reward is a number, or a dict with the number under `data.reward_key`, or None for
"cannot say".
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vime.config import Data
from vime.config.import_path import load_function
from vime.errors import UserError
from vime.rollout.data.problem import Problem
from vime.rollout.data.user_calls import CallFailed, UserCalls
from vime.rollout.rewards.math_verify import MathScorer
from vime.rollout.rewards.remote import RemoteScorer
from vime.rollout.rewards.rules import choice, exact, think_format

MATH_WORKERS = 2
SHARED = ("prompt", "answer", "record")
"""Arguments that do not depend on the response."""
RULES: dict[str, Callable[..., float]] = {"exact": exact, "choice": choice}


class Unscored(Exception):
    """The reward function gave nothing for a response: it raised, took too long, or returned no finite number."""


@dataclass(frozen=True)
class Answer:
    """A response as a scorer sees it."""

    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


class Scorer:
    """Scores the responses of a group. `close` ends what it started."""

    def __init__(self, data: Data, timeout: float, calls: UserCalls) -> None:
        """timeout: seconds that one call may take. Raises UserError when the scorer cannot be had."""
        self._data = data
        self._timeout = timeout
        self._calls = calls
        self._math = MathScorer(MATH_WORKERS, timeout) if data.reward == "math_verify" else None
        self._remote: RemoteScorer | None = None
        self._function: Callable[..., Any] | None = None
        self._names: set[str | None] = set()
        self.by_group = False
        """Whether the responses to a prompt are scored together, by one call."""
        if data.reward == "task":
            self._rule: Callable[..., float] | None = _task_scorer(data)
        else:
            self._rule = RULES.get(data.reward)
        if data.reward == "remote":
            assert data.reward_url is not None
            self._remote = RemoteScorer(data.reward_url, data.reward_tries, timeout)
        elif self._rule is None and self._math is None and data.reward != "format":
            self._function = load_function(data.reward, "data.reward")
            self._names = _parameters(self._function, data.reward)
            self.by_group = "responses" in self._names

    async def score(self, problem: Problem, responses: Sequence[Answer]) -> list[float | Unscored]:
        """One reward, or the reason why there is none, for each response.

        A group scorer that fails leaves all of them unscored. Raises UserError for what no other try would mend: a dict
        without `data.reward_key`, a list of the wrong length.
        """
        if self.by_group:
            return await self._score_group(problem, responses)
        if len(responses) == 1 or self._rule is not None:
            return [await self._score_one(problem, i, response) for i, response in enumerate(responses)]
        return list(await asyncio.gather(*(self._score_one(problem, i, r) for i, r in enumerate(responses))))

    async def close(self) -> None:
        """Ends the scorer's workers and connections."""
        if self._math is not None:
            self._math.close()
        if self._remote is not None:
            await self._remote.close()

    async def _score_one(self, problem: Problem, position: int, answered: Answer) -> float | Unscored:
        reward = self._data.reward
        try:
            if reward == "format":
                return think_format(answered.text)
            if reward == "task":
                assert self._rule is not None
                value: Any = self._rule(answered.text, problem.record)
            elif self._rule is not None:
                value = self._rule(answered.text, problem.answer)
            elif self._math is not None:
                value = await self._math.score(answered.text, problem.answer)
            elif self._remote is not None:
                fields = {"prompt": problem.prompt, "answer": problem.answer, "record": problem.record}
                value = await self._remote.score(**fields, response=answered.text, metadata=answered.metadata)
            else:
                what = f"sample {position} of prompt {problem.uid} ({_short(answered.text)})"
                value = await self._call(problem, what, response=answered.text, metadata=answered.metadata)
        except UserError:
            raise
        except CallFailed as error:
            return Unscored(f"data.reward={error}")
        except TimeoutError as error:
            reason = str(error) or f"it took more than rollout.reward_timeout={self._timeout:g} s"
            return Unscored(f"data.reward={reward} gave nothing: {reason}")
        except Exception as error:  # noqa: BLE001 - whatever a scorer trips over leaves its sample unscored
            return Unscored(f"data.reward={reward} raised {type(error).__name__}: {error}")
        return self._number(value)

    async def _score_group(self, problem: Problem, responses: Sequence[Answer]) -> list[float | Unscored]:
        what = f"the {len(responses)} responses to prompt {problem.uid}"
        texts, metadatas = [r.text for r in responses], [r.metadata for r in responses]
        try:
            values = await self._call(problem, what, responses=texts, metadatas=metadatas)
        except CallFailed as error:
            return [Unscored(f"data.reward={error}")] * len(responses)
        if values is None:
            return [Unscored(f"data.reward={self._data.reward} returned None")] * len(responses)
        if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__") or len(values) != len(responses):
            raise UserError(
                f"data.reward={self._data.reward} got {len(responses)} responses and must return as many rewards"
            )
        return [self._number(value) for value in values]

    def _call(self, problem: Problem, what: str, **given: Any) -> Awaitable[Any]:
        offered = {"prompt": problem.prompt, "answer": problem.answer, "record": problem.record, **given}
        taken = offered if None in self._names else {name: offered[name] for name in offered if name in self._names}
        assert self._function is not None
        return self._calls.call(self._data.reward, self._function, self._timeout, what, **taken)

    def _number(self, value: Any) -> float | Unscored:
        key, name = self._data.reward_key, f"data.reward={self._data.reward}"
        if isinstance(value, dict):
            found = ", ".join(sorted(map(str, value)))
            if key is None:
                raise UserError(f"{name} returns a dict ({found}): set data.reward_key to one of them")
            if key not in value:
                raise UserError(f"{name} returned a dict without data.reward_key={key!r}; it has {found}")
            value = value[key]
        if value is None:
            return Unscored(f"{name} returned None")
        try:
            number = float(value)
        except Exception:  # noqa: BLE001 - an object of the user's, whose conversion may raise anything
            return Unscored(f"{name} returned a {type(value).__name__}, not a number")
        return number if math.isfinite(number) else Unscored(f"{name} returned {number}")


def _task_scorer(data: Data) -> Callable[..., float]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(data.task, size=1, seed=0, **data.task_args)
    return lambda response, record: float(dataset.score_answer(response.strip(), record))


def _parameters(function: Callable[..., Any], path: str) -> set[str | None]:
    """Names of the keyword arguments that `function` takes; None among them when it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise UserError(f"data.reward={path} does not say what arguments it takes") from error
    names: set[str | None] = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names.add(None)
    elif not names & {"response", "responses"}:
        raise UserError(f"data.reward={path} takes neither `response` nor `responses`")
    known = {*SHARED, "response", "metadata", "responses", "metadatas"}
    strange = [p.name for p in parameters if p.default is p.empty and p.name not in known]
    if strange and None not in names:
        raise UserError(f"data.reward={path} takes `{strange[0]}`, but only {', '.join(sorted(known))} are given")
    return names


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
