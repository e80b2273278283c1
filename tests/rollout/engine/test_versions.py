"""Weights change under requests that run on a real engine: each token is labelled with the version that sampled it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.conftest import SERVED, EngineStack
from tests.rollout.reference import logprobs
from tests.rollout.sending import sending
from vime.models.tiny import make_tiny
from vime.rollout.client import Completion, RolloutClient, Sampling
from vime.run.tokens import router_token

pytestmark = pytest.mark.slow

PROMPTS = [[257, 48 + i, 43, 50, 258] for i in range(24)]
SAMPLES = 8


def test_every_token_is_labelled_with_the_weights_that_sampled_it(engine_stack: EngineStack, tmp_path: Path) -> None:
    """Two updates by pause?mode=keep come upon 192 responses; transformers tells the models' logprobs apart."""
    stack = engine_stack
    other = tmp_path / "model"
    make_tiny(SERVED.model_copy(update={"seed": 1}), other)
    models = {0: stack.model, 1: other, 2: stack.model}

    async def generate(update: Callable[[Path, int], None]) -> list[list[Completion]]:
        async with RolloutClient(stack.router_url, router_token(stack.role.token), 120, 30) as client:
            jobs = [
                asyncio.create_task(client.complete(prompt, SAMPLES, 100, Sampling(1.0, 1.0, ()), seed=1000 * i))
                for i, prompt in enumerate(PROMPTS)
            ]
            for version in (1, 2):
                await asyncio.sleep(1.0)
                await asyncio.to_thread(update, models[version], version)
            return await asyncio.gather(*jobs)

    with sending(stack.model, stack.engine_url, stack.role.token) as update:
        update(stack.model, 0)
        try:
            begun = time.monotonic()
            answers = asyncio.run(generate(update))
            print(f"{sum(len(c.token_ids) for a in answers for c in a)} tokens in {time.monotonic() - begun:.1f} s")
        finally:
            update(stack.model, 0)
    labels = {tuple(completion.versions[:, 1].tolist()) for answer in answers for completion in answer}
    assert (0, 1, 2) in labels, labels
    boundaries = set()
    for prompt, answer in zip(PROMPTS[::3], answers[::3], strict=True):
        for completion in answer:
            under = {path: logprobs(path, prompt, completion.token_ids) for path in (stack.model, other)}
            ends = np.append(completion.versions[1:, 0], len(completion.token_ids))
            for (begin, version), end in zip(completion.versions.tolist(), ends.tolist(), strict=True):
                # Old tokens are part of the new weights' context: transformers scores the whole under each model.
                np.testing.assert_allclose(
                    completion.logprobs[begin:end], under[models[version]][begin:end], atol=5e-5, err_msg=str(version)
                )
                boundaries.add(begin)
                others = under[other if models[version] == stack.model else stack.model]
                assert np.abs(completion.logprobs[begin:end] - others[begin:end]).max() > 1e-3
    assert len(boundaries) > 2, "requests had come to different lengths"


def test_an_engine_stops_working_on_what_nobody_waits_for(engine_stack: EngineStack) -> None:
    """A cancelled request passes guard and router and ends in the engine: over-sampling must not cost its surplus."""
    stack = engine_stack
    processes = [psutil.Process(stack.engine.pid), *psutil.Process(stack.engine.pid).children(recursive=True)]

    def worked() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    async def run() -> tuple[float, float]:
        async with RolloutClient(stack.router_url, router_token(stack.role.token), 120, 30) as client:
            jobs = [
                asyncio.create_task(client.complete(prompt, 64, 120, Sampling(1.0, 1.0, ()), seed=1 << 40 | i))
                for i, prompt in enumerate(PROMPTS)
            ]
            await asyncio.sleep(1)
            begun = worked()
            await asyncio.sleep(1.5)
            busy = worked() - begun
            assert [job.exception() for job in jobs if job.done()] == [None] * sum(job.done() for job in jobs)
            assert not all(job.done() for job in jobs), "the work is too little for this test"
            for job in jobs:
                job.cancel()
            await asyncio.sleep(2)
            begun = worked()
            await asyncio.sleep(1.5)
            return busy, worked() - begun

    busy, idle = asyncio.run(run())
    assert idle < 0.3 * busy, (busy, idle)
