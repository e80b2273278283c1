"""Generated tokens per second of the generator's path against a plain client of the same engine."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.row import Row, paired_ratio
from benchmarks.stack import Stack, serve
from vime.buffer.writer import BufferWriter
from vime.config import TinyModel
from vime.models.tiny import make_tiny
from vime.rollout.client import RolloutClient, Sampling
from vime.rollout.data.format import Turns, load_tokenizer, make_format
from vime.rollout.data.sources import load_problems
from vime.rollout.data.user_calls import UserCalls, worker_count
from vime.rollout.engine.server import SERVED_NAME
from vime.rollout.filters import Filters
from vime.rollout.generator import keep
from vime.rollout.group import Generation, request_seed
from vime.rollout.limits import read_limits
from vime.rollout.pipeline import Pipeline
from vime.rollout.policy_version import PolicyVersion
from vime.rollout.prompts import PromptFeed
from vime.rollout.rewards.scorer import Scorer
from vime.run.tokens import engine_token, router_token

MODEL = TinyModel(layers=2, hidden=192, heads=6, ffn=512, context=128, initializer_range=0.08)
"""tiny_grpo's; a wider initial range, so that a random model does not answer all alike."""
RESPONSES = {8: 12, 64: 6}
"""Longest response -> rounds: tiny_grpo's, and one at which the engine computes more than it parses requests."""
SEED = "benchmark"


@dataclass
class Step:
    """What one candidate did in one turn."""

    tokens: int
    seconds: float


def measure(prompts: int = 32, samples: int = 8, responses: Mapping[int, int] = RESPONSES) -> dict[str, Any]:
    """Tokens per second by response length and candidate, all with `prompts` requests in flight at once.

    generator: prompts rendered, asked through guard and router, checked, scored, written and committed as a batch.
    routed: the plain client through guard and router. direct: the plain client at the engine. The three send the same
    requests in a round, seeds included, and get the same tokens back.
    """
    with tempfile.TemporaryDirectory(prefix="vime-bench-") as name:
        model = Path(name) / "model"
        make_tiny(MODEL, model)
        with serve(model, Path(name), router=True) as stack:
            return {
                str(response): asyncio.run(_measure_length(stack, prompts, samples, response, rounds))
                for response, rounds in responses.items()
            }


def rows(measured: dict[str, Any]) -> list[Row]:
    """The whole path and the router alone, for each response length."""
    lines = []
    for length, result in measured.items():
        sizes, speed = result["sizes"], result["tokens_per_s"]
        direct = f"{speed['direct']:,.0f} tok/s direct client"
        text = f"generator, {sizes['prompts']} x {sizes['samples']} responses of <= {length} tokens"
        ratio, routed = result["generator_vs_direct"], result["routed_vs_direct"]
        lines += [
            Row(text, f"{speed['generator']:,.0f} tok/s", direct, ratio, at_least=0.95),
            Row("  guard and router alone", f"{speed['routed']:,.0f} tok/s", direct, routed),
        ]
    return lines


async def _measure_length(stack: Stack, prompts: int, samples: int, response: int, rounds: int) -> dict[str, Any]:
    chosen = {"prompts_per_step": prompts, "samples_per_prompt": samples, "max_response_tokens": response, "tries": 1}
    config = stack.config.model_copy(update={"rollout": stack.config.rollout.model_copy(update=chosen)})
    limits = replace(read_limits(config.rollout, stack.role.model), max_response=response)
    tokenizer = load_tokenizer(stack.role.model)
    problems = load_problems(config.data, config.run.seed, config.cluster.startup_timeout)
    calls = UserCalls(worker_count(config.rollout.reward_workers))
    render = make_format(config.data, tokenizer, config.rollout, calls)
    feed, same_feed = (
        PromptFeed(problems.training, config.run.seed, False, render, limits, config.rollout, _unreported)
        for _ in range(2)
    )
    scorer = Scorer(config.data, config.rollout.reward_timeout, calls)
    sampling = Sampling(config.rollout.temperature, config.rollout.top_p, limits.stop_token_ids)
    writer = BufferWriter(stack.run_dir, stack.control, config.buffer)
    step = (await asyncio.to_thread(writer.resume, 0)).step
    seconds: dict[str, list[float]] = {"direct": [], "routed": [], "generator": []}
    tokens: list[int] = []
    assert stack.router_url is not None
    at_engine = {"Authorization": f"Bearer {engine_token(stack.role.token, 0)}"}
    at_router = {"Authorization": f"Bearer {router_token(stack.role.token)}"}
    async with (
        RolloutClient(stack.router_url, router_token(stack.role.token), 60.0, 60.0) as client,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            trust_env=False,
        ) as session,
    ):
        generation = Generation(
            client=client,
            scorer=scorer,
            tokenizer=tokenizer,
            turns=Turns(config.data, tokenizer, limits.stop_token_ids),
            sampling=sampling,
            samples=samples,
            tries=1,
            seed=SEED,
            report=_unreported,
        )

        served = PolicyVersion(step - 1)
        pipeline = Pipeline(config, generation, feed, Filters(config.rollout, calls), served)

        async def generate() -> int:
            statistics, cursor = await pipeline.batch(step + turn, partial(keep, writer))
            await asyncio.to_thread(writer.commit_batch, step + turn, statistics.metrics(step + turn), cursor)
            return statistics.tally.tokens

        for turn in range(rounds + 1):
            bodies = [
                {
                    "model": SERVED_NAME,
                    "prompt": prompt.token_ids,
                    "n": samples,
                    "max_tokens": prompt.max_tokens,
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "stop_token_ids": list(sampling.stop_token_ids),
                    "logprobs": 0,
                    "return_token_ids": True,
                    "seed": request_seed(SEED, f"{prompt.index}/0"),
                }
                for prompt in [await same_feed.take() for _ in range(prompts)]
            ]
            await _serve(session, stack.engine_url, at_engine, step + turn - 1)
            served.set(step + turn - 1)
            candidates: dict[str, Callable[[], Awaitable[int]]] = {
                "direct": partial(_plain, session, stack.engine_url, at_engine, bodies),
                "routed": partial(_plain, session, stack.router_url, at_router, bodies),
                "generator": generate,
            }
            counts: set[int] = set()
            names = list(candidates)
            for name in names[turn % 3 :] + names[: turn % 3]:
                begun = time.perf_counter()
                counts.add(await candidates[name]())
                if turn:  # the first round warms up
                    seconds[name].append(time.perf_counter() - begun)
            if len(counts) != 1:
                raise RuntimeError(f"the same requests gave {sorted(counts)} tokens")
            tokens += counts
    await scorer.close()
    calls.close()
    return {
        "sizes": {
            "prompts": prompts,
            "samples": samples,
            "longest_response": response,
            "tokens": median(tokens),
            "rounds": rounds,
        },
        "seconds": {name: median(values) for name, values in seconds.items()},
        "tokens_per_s": {
            name: median(count / value for count, value in zip(tokens[1:], values, strict=True))
            for name, values in seconds.items()
        },
        "generator_vs_direct": paired_ratio(seconds["direct"], seconds["generator"]),
        "routed_vs_direct": paired_ratio(seconds["direct"], seconds["routed"]),
    }


def _unreported(event: str, **fields: Any) -> None:
    """Nothing is dropped here."""


async def _plain(
    session: aiohttp.ClientSession, url: str, headers: dict[str, str], bodies: list[dict[str, Any]]
) -> int:
    """All requests at once; the number of tokens that came back."""

    async def ask(body: dict[str, Any]) -> int:
        async with session.post(url + "/v1/completions", json=body, headers=headers) as response:
            content = await response.read()
            response.raise_for_status()
        return sum(len(choice["token_ids"]) for choice in json.loads(content)["choices"])

    return sum(await asyncio.gather(*(ask(body) for body in bodies)))


async def _serve(session: aiohttp.ClientSession, url: str, headers: dict[str, str], version: int) -> None:
    """Let the engine say that it serves `version`, as after an update."""
    for path, body in (("/update_weight_version", {"new_version": str(version)}), ("/resume", None)):
        async with session.post(url + path, json=body, headers=headers) as response:
            response.raise_for_status()
