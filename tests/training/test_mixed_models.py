"""Models of different kinds on the same ranks: each has its own layout of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks import Ranks, tiny_config
from tests.training.test_critic import TRAINING
from tests.training.test_replay import FAMILIES, LAYERS
from tests.training.test_replay import write_batch as write_routed_batch
from vime.buffer.manifest import Manifest
from vime.config import TinyModel
from vime.models.tiny import make_tiny
from vime.run.directory import RunDir

DENSE = TinyModel(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64, context=64, seed=3)


def _step(rank: int, store: Any, world: int, folder: Path, manifest: Manifest, training: Any) -> dict[str, float]:
    from vime.buffer.reader import BufferReader
    from vime.training import batch, parallel
    from vime.training.learner import Learner

    config = tiny_config(
        algorithm={"teacher": folder / "dense", "reference": folder / "dense", "kl_coefficient": 0.1},
        training={**TRAINING, "ranks": world, "max_tokens_per_microbatch": 48, **training},
    )
    parallel.initialize(config, store, rank, world)
    learner = Learner(config, folder / "hf")
    reader = BufferReader(RunDir(folder), config.buffer)
    return learner.train(batch.load(manifest, reader, config, version=0, replay=learner.replay))


def test_a_dense_teacher_and_reference_beside_a_policy_with_experts(ranks: Ranks, tmp_path: Path) -> None:
    make_tiny(FAMILIES["qwen3_moe"], tmp_path / "hf")
    make_tiny(DENSE, tmp_path / "dense")
    manifest = write_routed_batch(tmp_path, LAYERS)
    (expected,) = ranks.run(1, _step, tmp_path, manifest, {})
    for result in ranks.run(2, _step, tmp_path, manifest, {"expert_parallel": 2}):
        assert result == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert expected["train/kl_loss"] > 1e-3
