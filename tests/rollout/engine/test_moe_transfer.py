"""An engine with experts: its routes, and its weights after an update, which `cpu_reload` repairs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.conftest import STARTUP, end_role, stack_config, start_role
from tests.rollout.reference import load, logprobs
from tests.rollout.sending import send, sending
from vime.buffer.control import Control
from vime.config import Algorithm, TinyModel
from vime.config.compose import dump_resolved
from vime.models.family import architecture
from vime.models.routing import routing
from vime.models.tiny import make_tiny
from vime.rollout.client import Completion, RolloutClient, Sampling
from vime.run.directory import RunDir
from vime.run.role import Role
from vime.run.tokens import engine_token

pytestmark = pytest.mark.slow

PROMPT = [257, 49, 43, 50, 258]


def make_moe(folder: Path, seed: int) -> Path:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    make_tiny(TinyModel(context=128), folder)
    config = Qwen3MoeConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, moe_intermediate_size=96, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=128, eos_token_id=259, pad_token_id=256, bos_token_id=None, initializer_range=0.1,
        tie_word_embeddings=True, norm_topk_prob=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@dataclass
class MoeEngine:
    """A running engine that holds `models[0]` and answers routes."""

    models: list[Path]
    url: str
    token: str

    def complete(self, prompt: list[int], samples: int, seed: int) -> list[Completion]:
        """Samples as the generator asks for them, with their routes."""

        async def ask() -> list[Completion]:
            found = routing(architecture(self.models[0]))
            async with RolloutClient(self.url, engine_token(self.token, 0), 120, 60, found) as client:
                return await client.complete(prompt, samples, 16, Sampling(1.0, 1.0, (259,)), seed)

        return asyncio.run(ask())


@pytest.fixture(scope="module")
def moe_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MoeEngine]:
    folder = tmp_path_factory.mktemp("moe")
    models = [make_moe(folder / f"model{seed}", seed) for seed in (0, 1)]
    run_dir = RunDir.create(folder, "run", "test")
    config = stack_config(models[0]).model_copy(update={"algorithm": Algorithm(routing_replay=True)})
    run_dir.config.write_text(dump_resolved(config))
    token = secrets.token_hex(16)
    control, port = Control.serve("127.0.0.1", 1, token)
    role = Role(run_dir.path, "127.0.0.1", port, "engine", 1, token, 0, 1, "127.0.0.1", models[0])
    engine: Popen[bytes] = start_role(role, "vime.rollout.engine.engine")
    try:
        yield MoeEngine(models, control.engine(0, STARTUP).url, role.token)
    finally:
        end_role(engine)


def test_routes_are_the_experts_that_the_tokens_use(moe_engine: MoeEngine) -> None:
    for completion in moe_engine.complete(PROMPT, 4, seed=5):
        routes = completion.routes
        assert routes is not None
        assert routes.first == 0
        tokens = [*PROMPT, *completion.token_ids.tolist()]
        assert (np.sort(routes.ids) == chosen_experts(moe_engine.models[0], tokens[:-1])).all()


def test_a_cached_prefix_has_its_routes_too(moe_engine: MoeEngine) -> None:
    prompt = [(7 * i) % 250 for i in range(64)]
    (first,) = moe_engine.complete(prompt, 1, seed=1)
    longer = [*prompt, *first.token_ids.tolist()]
    (second,) = moe_engine.complete(longer, 1, seed=2)
    assert first.routes is not None
    assert second.routes is not None
    assert second.routes.first == 0
    assert second.routes.ids.shape[1] == len(longer) + len(second.token_ids) - 1
    known = first.routes.ids.shape[1]
    assert (np.sort(second.routes.ids[:, :known]) == np.sort(first.routes.ids)).all()


def chosen_experts(model: Path, tokens: list[int]) -> NDArray[np.int64]:
    """[layers, tokens, top-k] of transformers' router in float32, sorted."""
    network = load(model)
    with torch.no_grad():
        logits = network(torch.tensor([tokens]), output_router_logits=True).router_logits
    chosen = [layer.topk(network.config.num_experts_per_tok, dim=-1).indices.sort(-1).values for layer in logits]
    return np.asarray(torch.stack(chosen))


def test_experts_are_the_new_ones_after_each_update(moe_engine: MoeEngine) -> None:
    first, second = moe_engine.models

    def difference(model: Path) -> float:
        (completion,) = moe_engine.complete(PROMPT, 1, seed=3)
        expected = logprobs(model, PROMPT, completion.token_ids)
        return float(np.abs(completion.logprobs - expected).max())

    assert difference(first) < 2e-5
    for version, model in enumerate((second, first, second), 1):
        send(model, moe_engine.url, moe_engine.token, version)
        assert difference(model) < 2e-5, version


def test_responses_that_an_update_comes_upon_have_all_their_routes(moe_engine: MoeEngine) -> None:
    """pause?mode=keep computes running requests anew with the new weights; each token keeps the experts it came by."""
    models = dict(zip((4, 5), moe_engine.models, strict=True))
    prompts = [[*PROMPT[:-1], 48 + i, PROMPT[-1]] for i in range(8)]

    async def generate(update: Callable[[Path, int], None]) -> list[list[Completion]]:
        found = routing(architecture(moe_engine.models[0]))
        async with RolloutClient(moe_engine.url, engine_token(moe_engine.token, 0), 120, 60, found) as client:
            jobs = [
                asyncio.create_task(client.complete(prompt, 8, 100, Sampling(1.0, 1.0, ()), seed=1000 * i))
                for i, prompt in enumerate(prompts)
            ]
            # When this one has its 20 tokens, those that began before it are about as far.
            await client.complete(PROMPT, 1, 20, Sampling(1.0, 1.0, ()), seed=1)
            await asyncio.to_thread(update, models[5], 5)
            return await asyncio.gather(*jobs)

    with sending(models[4], moe_engine.url, moe_engine.token) as update:
        update(models[4], 4)
        answers = asyncio.run(generate(update))
    versions = [completion.versions for answer in answers for completion in answer]
    assert any(len(rows) > 1 and rows[1, 0] > 5 for rows in versions), "no response was well under way"
    for prompt, (completion, *_) in zip(prompts, answers, strict=True):
        assert completion.routes is not None
        assert completion.routes.first == 0
        tokens = [*prompt, *completion.token_ids.tolist()]
        # Position p predicts token p + 1; the prompt was computed with the first response token.
        lengths = np.diff(np.append(completion.versions[:, 0], len(completion.token_ids)))
        sampled_by = np.repeat(completion.versions[:, 1], lengths)
        computed_by = np.append(np.full(len(prompt) - 1, sampled_by[0]), sampled_by)
        under = {version: chosen_experts(model, tokens[:-1]) for version, model in models.items()}
        wanted = np.where((computed_by == 4)[None, :, None], under[4], under[5])
        assert (np.sort(completion.routes.ids) == wanted).all()
        assert (under[4] != under[5]).any()
