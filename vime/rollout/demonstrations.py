"""The generator of supervised fine-tuning: reference answers instead of sampled ones, into the same buffer."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from vime.buffer.control import Control
from vime.buffer.sample import Group, Sample
from vime.buffer.writer import BufferWriter
from vime.config import Config, Data, Demonstrations
from vime.config.compose import load_resolved
from vime.errors import UserError
from vime.rollout.data.fingerprint import fingerprint
from vime.rollout.data.format import Format, answer_end, answer_ids, load_tokenizer, make_format, probe_format
from vime.rollout.data.sources import Problems, load_problems, started_facts
from vime.rollout.data.user_calls import UserCalls, worker_count
from vime.rollout.generator import read_start
from vime.rollout.limits import Limits, read_limits
from vime.rollout.prompts import Prompt, PromptFeed
from vime.run.directory import RunDir
from vime.run.role import Role, die_with_parent

BATCHES_AHEAD = 4
"""Untrained batches that may lie in the buffer: making one takes less time than training it."""


def run_demonstrations(role: Role, config: Config) -> None:
    """Writes the batches of every step and waits until the last is trained."""
    limits = read_limits(config.rollout, role.model)
    tokenizer = load_tokenizer(role.model)
    calls = UserCalls(worker_count(config.rollout.reward_workers))
    render = make_format(config.data, tokenizer, config.rollout, calls)
    problems = load_problems(config.data, config.run.seed, config.cluster.startup_timeout)
    try:
        asyncio.run(_write_batches(role, config, limits, tokenizer, render, problems))
    finally:
        calls.close()


async def _write_batches(
    role: Role, config: Config, limits: Limits, tokenizer: Any, render: Format, problems: Problems
) -> None:
    run_dir = RunDir(role.run_dir)
    end = end_token(config.data, tokenizer, limits)
    await probe_format(render, problems.training)
    report = partial(run_dir.append_event, role)
    report("started", **started_facts(problems))
    control = Control.connect(role, config.cluster.startup_timeout)
    start = read_start(control, config.cluster.startup_timeout)
    writer = BufferWriter(run_dir, control, config.buffer)
    resumed = writer.resume(start.step)
    for reason in resumed.damaged:
        report("buffer_damaged", reason=reason)
    cursor = resumed.cursor if resumed.cursor is not None else start.cursor
    seed, shuffle, rollout = config.run.seed, config.data.shuffle, config.rollout
    feed = PromptFeed(
        problems.training,
        seed,
        shuffle,
        render,
        limits,
        rollout,
        report,
        cursor,
        resumed.groups,
        fingerprint(problems, config.data, tokenizer.chat_template),
        config.data.allow_change,
    )
    report("ready", step=resumed.step, resumed_groups=len(resumed.groups))
    steps, timeout = config.training.steps, config.buffer.wait_timeout
    for step in range(resumed.step, steps + 1):
        if step - BATCHES_AHEAD > start.step:
            oldest = step - BATCHES_AHEAD
            control.wait_consumed(oldest, timeout, f"the trainers to train the batch of step {oldest}")
        metrics = await _write_step(writer, feed, step, config, tokenizer, end, limits, resumed.groups)
        writer.commit_batch(step, metrics, feed.cursor())
    control.wait_consumed(steps, timeout, f"the trainers to train the batch of step {steps}")
    report("stopped")


def end_token(data: Data, tokenizer: Any, limits: Limits) -> int:
    """The token that an answer ends with: the chat template's, else the tokenizer's end of a sequence.

    Raises UserError when generation would not stop at it.
    """
    of_template = answer_end(data, tokenizer, limits.stop_token_ids)
    if of_template is not None:
        return of_template
    end = tokenizer.eos_token_id
    if end not in limits.stop_token_ids:
        raise UserError(
            f"the tokenizer's end-of-sequence token {end} is not among those that end a response,"
            f" {list(limits.stop_token_ids)}: add it to rollout.stop_token_ids"
        )
    return int(end)


async def _write_step(
    writer: BufferWriter,
    feed: PromptFeed,
    step: int,
    config: Config,
    tokenizer: Any,
    end: int,
    limits: Limits,
    written: frozenset[int],
) -> dict[str, float]:
    filtered_before, dropped_before, too_long = feed.filtered, feed.dropped, 0
    lengths: list[int] = []
    missing = config.rollout.prompts_per_step
    while missing:
        prompt = await feed.take()
        if prompt.index in written:
            missing -= 1
            continue
        answer = demonstrated_answer(prompt.problem.answer, config.demonstrations, prompt.index)
        ids = [*answer_ids(answer, tokenizer), end]
        if len(ids) > limits.context - len(prompt.token_ids):
            too_long += 1
            if too_long > 10 * config.rollout.prompts_per_step:
                raise UserError(
                    f"step {step}: {too_long} demonstrations do not fit into rollout.context={limits.context} tokens"
                )
            continue
        writer.add(Group(prompt.problem.uid, prompt.index, (demonstration(prompt, ids, step - 1),)))
        lengths.append(len(ids))
        missing -= 1
    return {
        "rollout/dropped_samples": float(feed.dropped - dropped_before),
        "rollout/filtered_prompts": float(feed.filtered - filtered_before + too_long),
        "rollout/response_len/mean": float(np.mean(lengths)) if lengths else 0.0,
    }


def demonstrated_answer(answer: str, demonstrations: Demonstrations, index: int) -> str:
    """The reference answer, or `decline_text` for `decline_share` of the stream positions.

    Which positions depends on the seed and the position alone.
    """
    draw = random.Random(f"{demonstrations.seed}/{index}")
    return demonstrations.decline_text if draw.random() < demonstrations.decline_share else answer


def demonstration(prompt: Prompt, response: Sequence[int], version: int) -> Sample:
    """A sample whose response is given rather than sampled: every token is trained on, reward and logprobs are 0."""
    return Sample(
        token_ids=np.asarray([*prompt.token_ids, *response], np.int32),
        prompt_length=len(prompt.token_ids),
        loss_mask=np.ones(len(response), np.uint8),
        rollout_logprobs=np.zeros(len(response), np.float32),
        versions=np.array([[0, version]], np.int32),
        reward=0.0,
        finish_reason="stop",
    )


def main() -> int:
    """Entry point of the role."""
    die_with_parent()
    role = Role.from_environment()
    try:
        run_demonstrations(role, load_resolved(RunDir(role.run_dir).config))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
