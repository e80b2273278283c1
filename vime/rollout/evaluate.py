"""Held-out evaluation on the same engines that generate for training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from vime.buffer.sample import Group
from vime.config import Config
from vime.errors import UserError
from vime.rollout.feed import Prompt, fit
from vime.rollout.format import Format
from vime.rollout.generate import Generation, Tally
from vime.rollout.limits import Limits
from vime.rollout.problem import Problem

SOLVED = 1.0 - 1e-6
"""A reward from here on counts as solved."""


@dataclass(frozen=True)
class Result:
    """One evaluation."""

    dataset: str
    accuracy: float
    """Share of the samples with a full reward."""
    mean_reward: float
    samples: int
    unscored: int
    """Samples that gave no reward within the tries, left out of the others."""


def evaluation_due(version: int, every: int, last: int) -> bool:
    """The first, the last, and each `every`-th version between them."""
    return version in (0, last) or (every > 0 and version % every == 0)


def evaluation_prompts(config: Config, problems: Sequence[Problem], render: Format, limits: Limits) -> list[Prompt]:
    """The same held-out prompts for every version. Raises UserError when there are fewer than asked for."""
    wanted = config.evaluation.prompts
    chosen = sorted(problems, key=lambda problem: problem.uid)
    fitting = [prompt for i, problem in enumerate(chosen) if (prompt := fit(i, problem, render, limits)) is not None]
    if len(fitting) < wanted:
        raise UserError(
            f"evaluation.prompts={wanted}, but only {len(fitting)} held-out problems are there and short enough;"
            " raise data.size or data.held_out, or give data.eval_path"
        )
    return fitting[:wanted]


def dataset_name(config: Config) -> str:
    """What the evaluated problems are called."""
    data = config.data
    if data.source == "reasoning_gym":
        return data.task
    if data.source == "jsonl":
        return str((data.eval_path or data.path or data.source).name) if data.path else data.source  # type: ignore[union-attr]
    return data.source


async def evaluate(generation: Generation, prompts: Sequence[Prompt], concurrency: int, dataset: str) -> Result:
    """Asks every prompt once and scores the answers."""
    tally = Tally()
    slots = asyncio.Semaphore(concurrency)

    async def ask(prompt: Prompt) -> Group | None:
        async with slots:
            return await generation.group(prompt, tally)

    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(prompt)) for prompt in prompts]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # the first says what is wrong; the role handles it by its own type
    rewards = [sample.reward for task in asked if (made := task.result()) is not None for sample in made.samples]
    count = max(len(rewards), 1)
    return Result(
        dataset=dataset,
        accuracy=sum(reward >= SOLVED for reward in rewards) / count,
        mean_reward=sum(rewards) / count,
        samples=len(rewards),
        unscored=tally.dropped,
    )
