"""Filling a step when samples, rewards or whole prompts fail: the engine is played, everything else is real."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vime.buffer.sample import Group
from vime.config import Data
from vime.rollout.client import BadResponse, Completion, Sampling
from vime.rollout.feed import PromptFeed
from vime.rollout.generate import Generation, request_seed
from vime.rollout.limits import Limits
from vime.rollout.problem import Problem
from vime.rollout.rewards import Scorer
from vime.rollout.step import StepStatistics, TooManyLost, fill_step

END = 0
LIMITS = Limits(context=100, stop_token_ids=(END,), max_response=10)


class Letters:
    """A tokenizer of sorts: token n is the letter with that number."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in ids)


class Engine:
    """Answers with what `script(prompt number, sample seed)` says or raises. Remembers what it was asked."""

    def __init__(self, script: Callable[[int, int], str]) -> None:
        self.script = script
        self.asked: list[tuple[int, int, int]] = []

    async def complete(
        self, prompt: list[int], samples: int, max_tokens: int, sampling: Sampling, seed: int
    ) -> list[Completion]:
        number = prompt[0]
        self.asked.append((number, samples, seed))
        await asyncio.sleep(0.02 / (1 + number % 3))  # later prompts may finish first
        texts = [self.script(number, seed + i) for i in range(samples)]
        ids = [[ord(letter) for letter in text] + [END] for text in texts]
        return [Completion(np.array(i, np.int32), np.zeros(len(i), np.float32), "stop") for i in ids]


def reward_of(response: str) -> float | None:
    """Rewards for letters: none for n, an exception for x."""
    if response == "x":
        raise ValueError("no reward for x")
    return None if response == "n" else float(response == "g")


def fill(
    script: Callable[[int, int], str],
    prompts: int,
    samples: int = 2,
    written: frozenset[int] = frozenset(),
    tries: int = 3,
) -> tuple[StepStatistics, list[Group], Engine, list[dict[str, Any]]]:
    engine, kept, events = Engine(script), list[Group](), list[dict[str, Any]]()

    async def keep(group: Group) -> None:
        kept.append(group)

    async def run() -> StepStatistics:
        data = Data.model_validate({"source": "jsonl", "path": "x", "reward": "tests.rollout.test_step:reward_of"})
        generation = Generation(
            client=engine,  # type: ignore[arg-type]
            scorer=Scorer(data, 5),
            tokenizer=Letters(),
            sampling=Sampling(1.0, 1.0, (END,)),
            samples=samples,
            tries=tries,
            seed="0",
            version=lambda: 4,
            report=lambda event, **fields: events.append({"event": event, **fields}),
        )
        problems = tuple(Problem(f"q{i}", "") for i in range(50))
        feed = PromptFeed(problems, 0, False, lambda p: [int(str(p.prompt)[1:])], LIMITS)
        return await fill_step(generation, feed, prompts, written, 4, keep)

    return asyncio.run(run()), kept, engine, events


def test_groups_come_in_the_order_of_the_stream() -> None:
    statistics, kept, engine, _ = fill(lambda number, seed: "g", 7)
    assert [group.index for group in kept] == list(range(7))
    assert len({seed for _, _, seed in engine.asked}) == 7
    assert statistics.tally.dropped == 0


def test_only_the_failed_sample_is_drawn_again_with_another_seed() -> None:
    """Case 1: one sample of a group has no reward; the others stay."""
    first = request_seed("0", 1, 0)
    _, kept, engine, events = fill(lambda number, seed: "n" if seed == first else "g", 3)
    assert [group.index for group in kept] == [0, 1, 2]
    assert all(len(group.samples) == 2 for group in kept)
    assert [(n, samples) for n, samples, _ in engine.asked if n == 1] == [(1, 2), (1, 1)]
    assert events == []


@pytest.mark.parametrize("letter", ["n", "x"])
def test_a_prompt_without_rewards_is_dropped_counted_and_replaced(letter: str) -> None:
    statistics, kept, engine, events = fill(lambda number, seed: letter if number == 1 else "g", 3)
    assert [group.index for group in kept] == [0, 2, 3]
    assert statistics.metrics(5)["rollout/dropped_samples"] == 2
    assert len([1 for number, _, _ in engine.asked if number == 1]) == 3
    assert [event["event"] for event in events] == ["sample_dropped"]
    assert ("returned None" if letter == "n" else "no reward for x") in events[0]["reasons"][0]


def test_when_nothing_is_scored_the_step_ends_with_the_share() -> None:
    with pytest.raises(
        TooManyLost, match=r"6 of 6 prompts \(100%\) gave no full group of samples: \d+ x returned None"
    ):
        fill(lambda number, seed: "n", 2)


def test_bad_responses_are_tries_too() -> None:
    def script(number: int, seed: int) -> str:
        if number == 0 and seed == request_seed("0", 0, 0):
            raise BadResponse("no logprobs")
        return "g"

    _, kept, engine, _ = fill(script, 2)
    assert [group.index for group in kept] == [0, 1]
    assert [samples for number, samples, _ in engine.asked if number == 0] == [2, 2]


def test_groups_of_an_earlier_attempt_are_not_made_again() -> None:
    _, kept, engine, _ = fill(lambda number, seed: "g", 4, written=frozenset({0, 2}))
    assert [group.index for group in kept] == [1, 3]
    assert {number for number, _, _ in engine.asked} == {1, 3}


def test_an_error_of_one_prompt_ends_the_step() -> None:
    def script(number: int, seed: int) -> str:
        if number == 2:
            raise RuntimeError("broken")
        return "g"

    with pytest.raises(RuntimeError, match="broken"):
        fill(script, 8)


def test_metrics() -> None:
    statistics, _, _, _ = fill(lambda number, seed: "g" if number == 0 or seed % 2 else "b", 2)
    metrics = statistics.metrics(step=7)
    assert metrics["rollout/raw_reward"] == 0.75
    assert metrics["rollout/zero_std_ratio"] == 0.5
    assert metrics["rollout/response_len/mean"] == 2.0
    assert metrics["rollout/truncated_ratio"] == 0.0
    assert (metrics["rollout/staleness/mean"], metrics["rollout/staleness/max"]) == (2.0, 2.0)
    assert metrics["perf/rollout_tok_per_s"] == pytest.approx(8 / metrics["perf/rollout_time"])


def test_seeds_of_requests_lie_far_apart() -> None:
    seeds = sorted(
        request_seed(root, index, attempt)
        for root in ("1/train", "1/evaluation")
        for index in range(500)
        for attempt in range(3)
    )
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 10_000
    assert seeds[-1] < 2**62
