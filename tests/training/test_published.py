"""The published models: planned, and built stage by stage without their memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.published import GLM45, GLM45_AIR, QWEN3_4B, QWEN3_30B_A3B
from tests.training.ranks import Ranks, tiny_config
from vime.config.compose import compose
from vime.plan.checks import check_model
from vime.plan.parameters import count
from vime.plan.plan import make_plan

# Parameters in billions, the next-token-prediction layer of GLM left out, by the models' own tensors.
PUBLISHED: dict[str, tuple[dict[str, Any], float, str, tuple[str, ...]]] = {
    "Qwen3-4B": (QWEN3_4B, 4.022, "qwen3_4b_grpo", ()),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.53, "qwen3_30b_a3b_grpo", ()),
    "GLM-4.5-Air": (GLM45_AIR, 106.85, "glm45_air_grpo", ()),
    "GLM-4.5": (
        GLM45,
        352.8,
        "glm45_air_grpo",
        (
            "model.shape=null",
            "training.ranks=64",
            "training.pipeline_parallel=4",
            "training.expert_parallel=16",
            "training.context_parallel=1",
            "rollout.tensor_parallel=8",
        ),
    ),
}


def _build(rank: int, store: Any, world_size: int, folder: Path) -> int:
    import torch
    from torch.utils._device import _device_constructors

    from vime.models.family import architecture
    from vime.training import model, parallel
    from vime.training.cpu import FACTORIES

    # One rank a stage: pipeline stages divide the layers, and nothing else divides them.
    config = tiny_config(training={"ranks": world_size, "pipeline_parallel": world_size, "dtype": "bfloat16"})
    parallel.initialize(config, store, rank, world_size)
    # The meta device takes over torch's own factories; it does not know those that stand for them on a CPU.
    patched = {name: getattr(torch, name) for name in FACTORIES}
    try:
        for name, factory in patched.items():
            setattr(torch, name, factory.__wrapped__)
        _device_constructors.cache_clear()
        with torch.device("meta"):
            (stage,) = model.build(architecture(folder), config, model.Policy)
    finally:
        for name, factory in patched.items():
            setattr(torch, name, factory)
        _device_constructors.cache_clear()
    assert all(parameter.is_meta for parameter in stage.parameters())
    return sum(parameter.numel() for parameter in stage.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_planned_and_built(ranks: Ranks, tmp_path: Path, name: str) -> None:
    published, billions, recipe, overrides = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = compose("gb200", recipe, [f"model.path={tmp_path}", *overrides], check=check_model)
    plan = make_plan(config)
    assert plan.data_parallel >= 1
    stages = 2 if name != "GLM-4.5" else 4
    built = sum(ranks.run(stages, _build, tmp_path))
    if published["tie_word_embeddings"]:
        built -= published["vocab_size"] * published["hidden_size"]  # the last stage's own copy
    assert built / 1e9 == pytest.approx(billions, rel=1e-3)
    if config.model.shape is not None:
        assert count(config.model.shape) == built
