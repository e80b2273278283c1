"""PPO's critic and a refreshed reference are checkpointed with the policy: a resumed run is an uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks import Ranks
from tests.training.test_checkpoint import STEPS, _tensors, _train
from tests.training.test_model import TINY
from tests.training.test_step import write_batch
from vime.buffer.manifest import Manifest
from vime.models.tiny import make_tiny

ALGORITHM = {
    "name": "ppo",
    "kl_coefficient": 0.05,
    "kl_in": "reward",
    "reference_refresh": 2,
    "critic": {"learning_rate": 1e-3, "warmup_steps": 3, "critic_only_steps": 1, "updates": 2},
}
CHAINS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "dp2": [(2, {})] * STEPS,
    "tp2_pp2_dp2_one": [(2, {"tensor_parallel": 2}), (2, {"pipeline_parallel": 2}), (2, {}), (1, {})],
    "plain_optimizer": [
        (2, {"distributed_optimizer": False}),
        (2, {"distributed_optimizer": False, "pipeline_parallel": 2}),
        (1, {"distributed_optimizer": False}),
        (2, {"distributed_optimizer": False, "tensor_parallel": 2, "sequence_parallel": True}),
    ],
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Path, Manifest]]]:
    folder = tmp_path_factory.mktemp("critic")
    make_tiny(TINY, folder / "hf")
    return folder / "hf", [(folder / f"run{i}", write_batch(folder / f"run{i}", seed=20 + i)) for i in range(STEPS)]


def _part(rank: int, store: Any, world: int, model: Path, folder: Path, batches: Any, training: Any, step: int) -> Any:
    sections = {"algorithm": ALGORITHM}
    return _train(
        rank, store, world, model, folder, batches, training, until=step, resume=folder.is_dir(), sections=sections
    )


@pytest.mark.parametrize("chain", CHAINS)
def test_a_resumed_run_is_an_uninterrupted_one(
    ranks: Ranks, prepared: tuple[Path, list[tuple[Path, Manifest]]], tmp_path: Path, chain: str
) -> None:
    model, batches = prepared
    plain = {"distributed_optimizer": False} if chain == "plain_optimizer" else {}
    (expected,) = ranks.run(1, _part, model, tmp_path / "whole", batches, plain, STEPS)
    last: dict[str, Any] = {}
    for step, (world_size, training) in enumerate(CHAINS[chain], start=1):
        results = ranks.run(world_size, _part, model, tmp_path / "parts", batches, training, step)
        last = results[0]
        for result in results:
            assert result["metrics"] == [pytest.approx(expected["metrics"][step - 1], abs=1e-5, rel=1e-5)], step
    assert ["train/pg_loss" in metrics for metrics in expected["metrics"]] == [False, True, True, True]
    assert len({metrics["train/critic_lr"] for metrics in expected["metrics"]}) == STEPS
    for name, tensor in expected["weights"].items():
        assert (last["weights"][name] - tensor).abs().max() < 1e-5, name
    (whole,) = ranks.run(1, _tensors, tmp_path / "whole" / f"step_{STEPS}")
    (parts,) = ranks.run(1, _tensors, tmp_path / "parts" / f"step_{STEPS}")
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        assert (parts[name] - tensor).abs().max() < 1e-5, name
    for prefix in ("critic.optimizer.state.exp_avg_sq", "critic.output_layer", "critic.decoder", "reference.decoder"):
        assert any(name.startswith(prefix) for name in whole), (prefix, sorted(whole))
    assert float(whole["critic.output_layer.weight"].abs().max()) > 1e-3
