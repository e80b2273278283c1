"""What is asked in an evaluation, and what is made of the answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vime.config import Config
from vime.config.compose import compose
from vime.errors import UserError
from vime.rollout.client import Completion, Sampling
from vime.rollout.data.format import FormatFailed, Turns
from vime.rollout.data.problem import Problem
from vime.rollout.data.user_calls import UserCalls
from vime.rollout.evaluate import (
    EvaluationTask,
    Result,
    evaluate,
    evaluated_versions,
    evaluation_due,
    evaluation_tasks,
    mean_pass_at,
    pass_at_k,
)
from vime.rollout.group import Generation
from vime.rollout.limits import Limits
from vime.rollout.rewards.scorer import Answer, Scorer, Unscored

LIMITS = Limits(context=40, stop_token_ids=(0,), max_response=20)


async def render(problem: Problem) -> list[int]:
    if problem.prompt == "!":
        raise FormatFailed("no !", "prompt !")
    return [ord(letter) for letter in str(problem.prompt)]


def unreported(event: str, **fields: Any) -> None:
    pass


class Letters:
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in ids)


class Engine:
    """Answers y to prompts with an e, in two of its samples; remembers how it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, Sampling, int]] = []

    async def complete(
        self, prompt: list[int], samples: int, max_tokens: int, sampling: Sampling, seed: int
    ) -> list[Completion]:
        self.asked.append((samples, max_tokens, sampling, seed))
        right = ord("e") in prompt
        texts = ["y" if right and i < 2 else "n" for i in range(samples)]
        version = np.array([[0, 3]], np.int32)
        return [Completion(np.array([ord(t), 0], np.int32), np.zeros(2, np.float32), "stop", version) for t in texts]


class LossyScorer(Scorer):
    """Gives no reward for some wrong answers to the problem that is solved, and none to one problem at all."""

    async def score(self, problem: Problem, answers: Sequence[Answer]) -> list[float | Unscored]:
        if problem.prompt == "d":
            return [Unscored("down")] * len(answers)
        rewards = await super().score(problem, answers)
        return [Unscored("down") if "e" in problem.prompt and i == 3 else one for i, one in enumerate(rewards)]


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    for samples in range(1, 7):
        for solved in range(samples + 1):
            outcomes = [1] * solved + [0] * (samples - solved)
            for k in range(1, samples + 1):
                subsets = list(itertools.combinations(outcomes, k))
                assert pass_at_k(samples, solved, k) == pytest.approx(np.mean([max(subset) for subset in subsets]))
    for wrong in ((4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)):
        with pytest.raises(ValueError, match="right responses among"):
            pass_at_k(*wrong)


def test_pass_at_k_over_problems() -> None:
    found = mean_pass_at([(4, 4), (4, 1), (2, 0)], 4)
    assert found == {"1": pytest.approx((1 + 0.25 + 0) / 3), "2": pytest.approx((1 + 0.5 + 0) / 3), "4": 1.0}
    assert mean_pass_at([], 4) == {}


def test_which_versions_are_due() -> None:
    assert [v for v in range(8) if evaluation_due(v, 3, 7)] == [0, 3, 6, 7]
    assert [v for v in range(8) if evaluation_due(v, 0, 7)] == [0, 7]
    events: list[dict[str, Any]] = [
        {"event": "evaluation", "version": 0}, {"event": "evaluation", "version": 6}, {"event": "ready", "version": 3}
    ]  # fmt: skip
    assert evaluated_versions(events, 5) == {0}


def config_with(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "y"}\n')
    (tmp_path / "hard.jsonl").write_text("".join(f'{{"prompt": "h{c}", "answer": "y"}}\n' for c in "abcde"))
    given = [f"data.path={tmp_path}/train.jsonl", "data.source=jsonl", "data.reward=exact", *overrides]
    return compose("local", "tiny_grpo", given)


def test_data_sets_have_sampling_of_their_own(tmp_path: Path) -> None:
    config = config_with(
        tmp_path,
        "evaluation={prompts: 2, samples_per_prompt: 2, temperature: 0.7}",
        f"evaluation.datasets={{hard: {{path: {tmp_path}/hard.jsonl, samples_per_prompt: 4, temperature: 0,"
        " top_p: 0.9, max_response_tokens: 5, reward: choice},"
        f" same: {{path: {tmp_path}/hard.jsonl, prompts: 3}}}}",
    )
    held_out = [Problem(c, "y") for c in ("be", "c", "d" * 50, "d")]
    own, hard, same = asyncio.run(evaluation_tasks(config, held_out, render, LIMITS, unreported))
    assert (own.name, len(own.prompts), own.samples, own.temperature, own.top_p) == ("train.jsonl", 2, 2, 0.7, 1.0)
    assert (hard.name, len(hard.prompts), hard.samples, hard.temperature, hard.top_p) == ("hard", 5, 4, 0.0, 0.9)
    assert {prompt.max_tokens for prompt in hard.prompts} == {5}
    assert hard.data.reward == "choice"
    assert (len(same.prompts), same.samples, same.temperature, same.data.reward) == (3, 2, 0.7, "exact")
    with pytest.raises(UserError, match="only 1 held-out problems are there and make a prompt that is short enough"):
        asyncio.run(evaluation_tasks(config, held_out[2:], render, LIMITS, unreported))


def test_a_prompt_that_the_format_fails_on_is_left_out_and_reported(tmp_path: Path) -> None:
    config = config_with(tmp_path, "evaluation={prompts: 2}")
    events: list[dict[str, Any]] = []
    held_out = [Problem(c, "y") for c in ("be", "!", "c")]
    (own,) = asyncio.run(evaluation_tasks(config, held_out, render, LIMITS, lambda event, **f: events.append(f)))
    assert {prompt.problem.prompt for prompt in own.prompts} == {"be", "c"}
    assert events == [{"prompt": held_out[1].uid, "reason": "no !"}]


def evaluated(task: EvaluationTask, engine: Engine, scorer: Scorer) -> Result:
    generation = Generation(
        client=engine,  # type: ignore[arg-type]
        scorer=scorer,
        tokenizer=Letters(),
        turns=Turns(task.data, Letters(), (0,)),
        sampling=Sampling(task.temperature, task.top_p, (0,)),
        samples=task.samples,
        tries=1,
        seed="1/evaluation",
        report=unreported,
    )
    return asyncio.run(evaluate(generation, task, concurrency=2))


def test_the_answers_are_counted_by_problem(tmp_path: Path) -> None:
    config = config_with(
        tmp_path,
        "evaluation.prompts=0",
        f"evaluation.datasets={{hard: {{path: {tmp_path}/hard.jsonl, samples_per_prompt: 4, temperature: 0.5}}}}",
    )
    (task,) = asyncio.run(evaluation_tasks(config, [], render, LIMITS, unreported))
    engine = Engine()
    result = evaluated(task, engine, Scorer(task.data, 5, UserCalls(1)))
    assert (result.dataset, result.samples, result.unscored) == ("hard", 20, 0)
    assert result.unscored_problems == 0
    assert result.accuracy == result.mean_reward == pytest.approx(2 / 20)
    # One of five problems, solved by 2 of 4: pass@2 = 1 - C(2, 2) / C(4, 2).
    assert result.pass_at == {"1": pytest.approx(0.1), "2": pytest.approx(5 / 6 / 5), "4": pytest.approx(0.2)}
    assert {(samples, most, sampling.temperature) for samples, most, sampling, _ in engine.asked} == {(4, 20, 0.5)}
    assert len({seed for *_, seed in engine.asked}) == 5


def test_unscored_samples_are_counted_and_left_out(tmp_path: Path) -> None:
    config = config_with(tmp_path, "evaluation={prompts: 3, samples_per_prompt: 4}")
    held_out = [Problem(letter, "y") for letter in "ecd"]
    (task,) = asyncio.run(evaluation_tasks(config, held_out, render, LIMITS, unreported))
    result = evaluated(task, Engine(), LossyScorer(task.data, 5, UserCalls(1)))
    # e: 2 of 3 scored samples; c: 0 of 4; d: none scored.
    assert (result.samples, result.unscored, result.unscored_problems) == (7, 5, 1)
    assert result.accuracy == pytest.approx(2 / 7), "each sample counts alike"
    assert result.pass_at["1"] == pytest.approx((2 / 3 + 0) / 2), "each problem counts alike"
    nothing = replace(task, prompts=tuple(p for p in task.prompts if p.problem.prompt == "d"))
    result = evaluated(nothing, Engine(), LossyScorer(task.data, 5, UserCalls(1)))
    assert (result.accuracy, result.pass_at, result.unscored) == (None, {}, 4), "no accuracy is not an accuracy of 0"
