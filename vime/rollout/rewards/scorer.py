"""How a response is scored: by the task's own scorer, a rule, another server, or a function of the user's.

A function of the user's is called with keyword arguments, of which it takes those that it names: `prompt` (text or
messages), `answer` (the reference), `record` (the source's own), and either `response` (one text: it scores a sample)
with its `metadata` (what a custom generate left), or `responses` (a list: it scores a group and returns a list) with
`metadatas`. It may be async. A reward is a number, or a dict with the number under `data.reward_key`, or None for
"cannot say".

vime's own scorers give 0 for whatever the policy wrote that is no answer, also when it was made to stop them; only a
scorer that could not look leaves a sample unscored.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vime.config import Data
from vime.config.import_path import load_function
from vime.errors import UserError
from vime.rollout.data.problem import Problem
from vime.rollout.data.results import GroupRewards, Reward
from vime.rollout.data.user_calls import CallFailed, UserCalls, is_async
from vime.rollout.rewards.remote import RemoteScorer
from vime.rollout.rewards.rules import choice, exact, think_format
from vime.rollout.workers.pool import Stopped, Unsendable

SHARED = ("prompt", "answer", "record")
"""Arguments that do not depend on the response."""
RULES: dict[str, Callable[[str, str], float]] = {
    "exact": exact,
    "choice": choice,
    "format": lambda response, _: think_format(response),
}
"""They take no longer than the text is long, and evaluate nothing: these run in the generator."""
READERS = {"task": "vime.rollout.rewards.task:score", "math_verify": "vime.rollout.rewards.math_verify:score"}
"""They evaluate or take long: these run in sandboxed workers."""


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
        self._number = Reward(f"data.reward={data.reward}", data.reward_key)
        self._remote: RemoteScorer | None = None
        self._function: Callable[..., Any] | None = None
        self._names: set[str | None] = set()
        self._stopped: set[str] = set()
        self.by_group = False
        """Whether the responses to a prompt are scored together, by one call."""
        if data.reward == "task":
            # Loaded before the workers part, so that each has it.
            calls.scoring.prepare.append(("vime.rollout.rewards.task:prepare", _task(data)))
        elif data.reward == "math_verify":
            calls.scoring.prepare.append(("vime.rollout.rewards.math_verify:prepare", {}))
        elif data.reward == "remote":
            assert data.reward_url is not None
            self._remote = RemoteScorer(data.reward_url, data.reward_tries, timeout)
        elif data.reward not in RULES:
            self._function = load_function(data.reward, "data.reward")
            self._names = _parameters(self._function, data.reward)
            self.by_group = "responses" in self._names

    async def score(self, problem: Problem, responses: Sequence[Answer]) -> list[float | Unscored]:
        """One reward, or the reason why there is none, for each response.

        A group scorer that fails leaves all of them unscored. Raises UserError for what no other try would mend: a dict
        without `data.reward_key`, a list of the wrong length.
        """
        if self._data.reward in READERS:
            return await self._read(problem, responses)
        if self._data.reward in RULES:
            return [self._judge(problem, response) for response in responses]
        if self.by_group:
            return await self._score_group(problem, responses)
        return list(await asyncio.gather(*(self._score_one(problem, i, r) for i, r in enumerate(responses))))

    async def close(self) -> None:
        """Ends the scorer's connections; the workers are those of `UserCalls`."""
        if self._remote is not None:
            await self._remote.close()

    async def _read(self, problem: Problem, responses: Sequence[Answer]) -> list[float | Unscored]:
        """By a scorer of vime's own in sandboxed workers."""
        reward = self._data.reward
        shared = {"record": problem.record, **_task(self._data)} if reward == "task" else {"answer": problem.answer}
        items = [{"response": response.text} for response in responses]
        try:
            outcomes = await self._calls.scoring.map(READERS[reward], shared, items, self._timeout)
        except Unsendable as error:
            return [Unscored(f"data.reward={reward} was not called: {error}")] * len(responses)
        scored: list[float | Unscored] = []
        for response, (value, failed) in zip(responses, outcomes, strict=True):
            if failed is None:
                scored.append(self._scored(self._number(value)))
            elif isinstance(failed, Stopped):
                self._say_stopped(f"{failed}", problem, response)
                scored.append(0.0)
            else:
                scored.append(Unscored(f"data.reward={reward} raised {failed.type}: {failed.text}"))
        return scored

    def _say_stopped(self, how: str, problem: Problem, response: Answer) -> None:
        if how not in self._stopped:
            self._stopped.add(how)
            where = f"{_short(response.text)}, an answer to prompt {problem.uid}"
            print(f"data.reward={self._data.reward} {how} on {where}: such responses get 0", file=sys.stderr)

    def _judge(self, problem: Problem, response: Answer) -> float | Unscored:
        try:
            return RULES[self._data.reward](response.text, problem.answer)
        except ValueError as error:  # the reference answer's fault
            return Unscored(f"data.reward={self._data.reward} raised {type(error).__name__}: {error}")

    async def _score_one(self, problem: Problem, position: int, answered: Answer) -> float | Unscored:
        name = f"data.reward={self._data.reward}"
        try:
            if self._remote is not None:
                fields = {"prompt": problem.prompt, "answer": problem.answer, "record": problem.record}
                found = await self._remote.score(**fields, response=answered.text, metadata=answered.metadata)
                return self._scored(self._number(found))
            what = f"sample {position} of prompt {problem.uid} ({_short(answered.text)})"
            return self._scored(
                await self._call(problem, what, self._number, response=answered.text, metadata=answered.metadata)
            )
        except UserError:
            raise
        except CallFailed as error:
            return Unscored(f"data.reward={error}")
        except TimeoutError as error:
            reason = str(error) or f"it took more than rollout.reward_timeout={self._timeout:g} s"
            return Unscored(f"{name} gave nothing: {reason}")
        except Exception as error:  # noqa: BLE001 - whatever a scorer trips over leaves its sample unscored
            return Unscored(f"{name} raised {type(error).__name__}: {error}")

    async def _score_group(self, problem: Problem, responses: Sequence[Answer]) -> list[float | Unscored]:
        what = f"the {len(responses)} responses to prompt {problem.uid}"
        texts, metadatas = [r.text for r in responses], [r.metadata for r in responses]
        returns = GroupRewards(self._number, len(responses))
        try:
            values = await self._call(problem, what, returns, responses=texts, metadatas=metadatas)
        except CallFailed as error:
            return [Unscored(f"data.reward={error}")] * len(responses)
        return [self._scored(value) for value in values]

    def _call(self, problem: Problem, what: str, returns: Callable[[Any], Any], **given: Any) -> Awaitable[Any]:
        offered = {"prompt": problem.prompt, "answer": problem.answer, "record": problem.record, **given}
        taken = offered if None in self._names else {name: offered[name] for name in offered if name in self._names}
        assert self._function is not None
        if is_async(self._function):  # it runs in this process, and what it changes must not change the sample
            taken |= {name: copy.deepcopy(taken[name]) for name in ("metadata", "metadatas") if name in taken}
        return self._calls.call(self._data.reward, self._function, self._timeout, what, returns, **taken)

    @staticmethod
    def _scored(value: float | str) -> float | Unscored:
        return Unscored(value) if isinstance(value, str) else value


def _task(data: Data) -> dict[str, str]:
    return {"task": data.task, "task_args": json.dumps(data.task_args)}


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
