"""The routes of a real engine in bfloat16, where routing differs, replayed by Megatron in float32."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import STARTUP, end_role, stack_config, start_role
from tests.training.ranks import Ranks
from tests.training.test_replay import LAYOUTS, replayed_step
from vime.buffer.chunk import write_chunk
from vime.buffer.control import Control
from vime.buffer.manifest import CHUNKS, Manifest, entries
from vime.buffer.sample import Group, Sample
from vime.config import TinyModel
from vime.config.algorithm import Algorithm
from vime.config.compose import dump_resolved
from vime.models.family import architecture
from vime.models.routing import Routing, routing
from vime.models.tiny import make_tiny
from vime.rollout.client import Completion, RolloutClient, Sampling
from vime.run.directory import RunDir
from vime.run.role import Role
from vime.run.tokens import engine_token

pytestmark = pytest.mark.slow

EXPERTS, TOP_K = 32, 4
TINY = TinyModel(
    family="glm4_moe", layers=4, dense_layers=1, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=96, context=128,
    experts=EXPERTS, top_k=TOP_K, expert_ffn=96, routing_bias=0.02, initializer_range=0.1,
    tied_embeddings=False,
)  # fmt: skip


def generate(url: str, token: str, routers: Routing) -> list[Group]:
    """Groups of responses to random prompts, some of which begin alike, as the engine answers them."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 256, 40).tolist()
    prompts = [[*(shared if i % 2 else []), *rng.integers(0, 256, 12).tolist()] for i in range(4)]

    async def ask() -> list[list[Completion]]:
        async with RolloutClient(url, token, 120, 60, routers) as client:
            requests = [
                client.complete(prompt, 2, 24, Sampling(1.0, 1.0, ()), seed=i * 1000)
                for i, prompt in enumerate(prompts)
            ]
            return list(await asyncio.gather(*requests))

    groups = []
    for index, (prompt, completions) in enumerate(zip(prompts, asyncio.run(ask()), strict=True)):
        samples = []
        for number, completion in enumerate(completions):
            assert completion.routes is not None
            length = len(completion.token_ids)
            samples.append(
                Sample(
                    token_ids=np.array([*prompt, *completion.token_ids], np.int32),
                    prompt_length=len(prompt),
                    loss_mask=np.ones(length, np.uint8),
                    rollout_logprobs=completion.logprobs,
                    versions=np.array([[0, 0]], np.int32),
                    reward=float(number),
                    finish_reason="stop",
                    routed_experts=completion.routes.ids,
                    first_route=completion.routes.first,
                )
            )
        groups.append(Group(f"p{index}", index, tuple(samples)))
    return groups


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Manifest]:
    """The model, and a batch that an engine in bfloat16 generated with it."""
    folder = tmp_path_factory.mktemp("routes")
    model = folder / "model"
    make_tiny(TINY, model)
    found = routing(architecture(model))
    assert found == Routing(layers=4, moe_layers=(1, 2, 3), experts=EXPERTS, top_k=TOP_K)
    config = stack_config(model)
    config = config.model_copy(
        update={
            "algorithm": Algorithm(routing_replay=True),
            "rollout": config.rollout.model_copy(update={"dtype": "bfloat16"}),
        }
    )
    run_dir = RunDir.create(folder, "run", "test")
    run_dir.config.write_text(dump_resolved(config))
    token = secrets.token_hex(16)
    control, port = Control.serve("127.0.0.1", 1, token)
    role = Role(run_dir.path, "127.0.0.1", port, "engine", 1, token, 0, 1, "127.0.0.1", model)
    engine = start_role(role, "vime.rollout.engine.engine")
    try:
        groups = generate(control.engine(0, STARTUP).url, engine_token(role.token, 0), found)
    finally:
        end_role(engine)
    chunks = run_dir.buffer / CHUNKS
    chunks.mkdir(parents=True)
    info = write_chunk(chunks, "c0.safetensors", groups, EXPERTS)
    return (
        model,
        run_dir.path,
        Manifest(step=1, version=0, chunks=(info,), samples=tuple(entries("c0.safetensors", groups))),
    )


@pytest.mark.parametrize("layout", ["one", "pp2", "tp2_ep2", "cp2"])
def test_megatron_uses_the_experts_of_the_engine(
    ranks: Ranks, generated: tuple[Path, Path, Manifest], layout: str
) -> None:
    model, run, manifest = generated
    world_size, training = LAYOUTS[layout]
    training = {**training, "recompute": "full", "max_tokens_per_microbatch": 160}
    results = ranks.run(world_size, replayed_step, model, run, manifest, {"training": training})
    for result in results:
        assert result["checked"]
        for place, (good, bad, free) in result["checked"].items():
            assert bad == 0, place
            assert good > free, place
        assert result["metrics"]["train/routing_replay_coverage"] == 1.0
