"""Held-out evaluation on the same engines that generate for training."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import Any

from vime.buffer.sample import Group, Sample
from vime.config import Config, Data
from vime.errors import UserError
from vime.rollout.data.format import Format, FormatFailed
from vime.rollout.data.problem import Problem
from vime.rollout.data.sources import read_jsonl
from vime.rollout.group import Generation, Tally
from vime.rollout.limits import Limits
from vime.rollout.prompts import Prompt, Report, fit

SOLVED = 1.0 - 1e-6
"""A reward from here on counts as solved."""


@dataclass(frozen=True)
class Result:
    """One evaluation of one data set."""

    dataset: str
    accuracy: float | None
    """Share of the scored samples with a full reward: each sample counts alike. None when none was scored."""
    mean_reward: float | None
    samples: int
    """Samples with a reward."""
    unscored: int
    """Samples that gave no reward within the tries, left out of all shares."""
    unscored_problems: int
    """Problems of which no sample gave one."""
    pass_at: dict[str, float]
    """pass@k by k, the mean over problems with at least k scored samples: each problem counts alike. pass@1 is the
    accuracy when no sample is unscored; otherwise a problem that lost samples counts as much as before in pass@1, and
    less in the accuracy."""
    truncated: float | None
    """Share of the scored samples that were cut off."""
    seconds: float


@dataclass(frozen=True)
class EvaluationTask:
    """What is asked of one data set, and how."""

    name: str
    prompts: tuple[Prompt, ...]
    data: Data
    """How its answers are scored."""
    samples: int
    temperature: float
    top_p: float


def evaluation_due(version: int, every: int, last: int) -> bool:
    """The first, the last, and each `every`-th version between them."""
    return version in (0, last) or (every > 0 and version % every == 0)


def evaluated_versions(events: Iterable[Mapping[str, Any]], at_most: int) -> set[int]:
    """The versions up to `at_most` that an earlier attempt has evaluated, from the run's events."""
    seen = (event.get("version") for event in events if event.get("event") == "evaluation")
    return {version for version in seen if isinstance(version, int) and version <= at_most}


async def evaluation_tasks(
    config: Config, held_out: Sequence[Problem], render: Format, limits: Limits, report: Report
) -> list[EvaluationTask]:
    """What every evaluation asks: the same prompts for every version. Those that the format fails on are reported.

    Raises UserError when there are fewer held-out problems than asked for, or a file is wrong.
    """
    evaluation, data = config.evaluation, config.data
    most = evaluation.max_response_tokens or limits.max_response
    tasks = []
    if evaluation.prompts:
        fitting = await _fitting(held_out, render, replace(limits, max_response=most), report)
        if len(fitting) < evaluation.prompts:
            raise UserError(
                f"evaluation.prompts={evaluation.prompts}, but only {len(fitting)} held-out problems are there and"
                " make a prompt that is short enough; raise data.size or data.held_out, or give data.eval_path"
            )
        prompts = tuple(fitting[: evaluation.prompts])
        sampling = evaluation.samples_per_prompt, evaluation.temperature, evaluation.top_p
        tasks.append(EvaluationTask(dataset_name(config), prompts, data, *sampling))
    for name, given in evaluation.datasets.items():
        problems = read_jsonl(given.path, data.prompt_key, data.answer_key)
        room = replace(limits, max_response=given.max_response_tokens or most)
        fitting = await _fitting(problems, render, room, report)
        if len(fitting) < (given.prompts or 1):
            raise UserError(
                f"evaluation.datasets.{name}.prompts={given.prompts or 1}, but only {len(fitting)} of {given.path}"
                " make a prompt that is short enough"
            )
        tasks.append(
            EvaluationTask(
                name=name,
                prompts=tuple(fitting[: given.prompts]),
                data=data.model_copy(update={"source": "jsonl", "reward": given.reward or data.reward}),
                samples=given.samples_per_prompt or evaluation.samples_per_prompt,
                temperature=evaluation.temperature if given.temperature is None else given.temperature,
                top_p=given.top_p or evaluation.top_p,
            )
        )
    return tasks


def dataset_name(config: Config) -> str:
    """What data's own held-out problems are called."""
    data = config.data
    if data.source == "reasoning_gym":
        return data.task
    if data.source == "jsonl":
        path = data.eval_path or data.path
        return path.name if path is not None else data.source
    return data.source


async def evaluate(generation: Generation, task: EvaluationTask, concurrency: int) -> Result:
    """Asks every prompt once and scores the answers."""
    slots = asyncio.Semaphore(concurrency)
    begun = time.monotonic()

    async def ask(prompt: Prompt) -> tuple[Group | None, Tally]:
        async with slots:
            return await generation.group(prompt)

    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(prompt)) for prompt in task.prompts]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # the first says what is wrong; the role handles it by its own type
    groups = [group for group, _ in (one.result() for one in asked) if group is not None]
    samples = [sample for group in groups for sample in group.samples]
    solved = [sum(sample.reward >= SOLVED for sample in group.samples) for group in groups]
    return Result(
        dataset=task.name,
        accuracy=_share(sum(solved), samples),
        mean_reward=_share(sum(sample.reward for sample in samples), samples),
        samples=len(samples),
        unscored=sum(one.result()[1].dropped for one in asked),
        unscored_problems=len(asked) - len(groups),
        pass_at=mean_pass_at([(len(group.samples), c) for group, c in zip(groups, solved, strict=True)], task.samples),
        truncated=_share(sum(sample.finish_reason == "truncated" for sample in samples), samples),
        seconds=round(time.monotonic() - begun, 3),
    )


def _share(total: float, samples: Sequence[Sample]) -> float | None:
    return total / len(samples) if samples else None


async def _fitting(problems: Sequence[Problem], render: Format, limits: Limits, report: Report) -> list[Prompt]:
    prompts = []
    for index, problem in enumerate(sorted(problems, key=lambda problem: problem.uid)):
        try:
            prompt = await fit(index, problem, render, limits)
        except FormatFailed as error:
            report("evaluation_prompt_left_out", prompt=problem.uid, reason=error.reason)
            continue
        if prompt is not None:
            prompts.append(prompt)
    return prompts


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) of one problem.

    Source: Evaluating Large Language Models Trained on Code, arXiv 2107.03374, equation 1. Raises ValueError unless
    1 <= k <= samples and 0 <= solved <= samples.
    """
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} of {solved} right responses among {samples}")
    return 1.0 - comb(samples - solved, k) / comb(samples, k)


def mean_pass_at(counts: Sequence[tuple[int, int]], most: int) -> dict[str, float]:
    """pass@k averaged over problems of (samples, solved), for k = 1, 2, 4, ... up to `most`.

    A problem with fewer than k samples does not count for that k; a k without problems is left out.
    """
    result = {}
    k = 1
    while k <= most:
        values = [pass_at_k(samples, solved, k) for samples, solved in counts if samples >= k]
        if values:
            result[str(k)] = sum(values) / len(values)
        k *= 2
    return result
