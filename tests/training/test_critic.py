"""PPO's critic: checkpointed with the policy and a refreshed reference, and of experts that no engine chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.ranks import Ranks, tiny_config
from tests.training.test_checkpoint import STEPS, TRAINING, _tensors, _train
from tests.training.test_model import TINY
from tests.training.test_replay import FAMILIES, LAYERS
from tests.training.test_replay import LAYOUTS as EXPERT_LAYOUTS
from tests.training.test_replay import write_batch as write_routed_batch
from tests.training.test_step import write_batch
from vime.buffer.manifest import Manifest
from vime.models.tiny import make_tiny
from vime.run.directory import RunDir

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


def _two_steps(
    rank: int, store: Any, world: int, folder: Path, manifest: Manifest, replay: bool, training: Any
) -> dict[str, Any]:
    from vime.buffer.reader import BufferReader
    from vime.training import batch, parallel
    from vime.training.learner import Learner
    from vime.training.weights import hf_export

    config = tiny_config(
        # The value head begins with 0, so that only the second update moves the critic's experts.
        algorithm={"name": "ppo", "routing_replay": replay, "critic": {"learning_rate": 1e-3, "updates": 2}},
        training={**TRAINING, "ranks": world, "max_tokens_per_microbatch": 48, **training},
    )
    parallel.initialize(config, store, rank, world)
    learner = Learner(config, folder / "hf")
    assert learner.critic is not None
    reader = BufferReader(RunDir(folder), config.buffer)
    metrics = [learner.train(batch.load(manifest, reader, config, version=0, replay=learner.replay)) for _ in range(2)]
    weights = {}
    for model, chunks in (("policy", learner.policy), ("critic", learner.critic.chunks)):
        exported = hf_export.export(chunks, torch.float32) if parallel.is_leading() else ()
        weights |= {(model, name): tensor for name, tensor in exported if (model, name) != ("critic", "lm_head.weight")}
    weights["critic", "value head"] = learner.critic.chunks[-1].output_layer.weight.detach()
    return {"metrics": metrics, "weights": weights}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_critics_experts_are_its_own_in_every_layout(ranks: Ranks, tmp_path: Path, family: str) -> None:
    """With replay the policy takes the routes of the batch, which are random, and the critic those of its routers."""
    make_tiny(FAMILIES[family], tmp_path / "hf")
    manifest = write_routed_batch(tmp_path, LAYERS - (family == "glm4_moe"))
    initial = load_file(tmp_path / "hf" / "model.safetensors")
    first = {}
    for replay, layouts in ((True, ("ep2", "tp2_ep2")), (False, ("ep2",))):
        (expected,) = ranks.run(1, _two_steps, tmp_path, manifest, replay, {})
        first[replay] = expected["metrics"][0]
        for layout in layouts:
            world_size, training = EXPERT_LAYOUTS[layout]
            results = ranks.run(world_size, _two_steps, tmp_path, manifest, replay, training)
            for result in results:
                for seen, wanted in zip(result["metrics"], expected["metrics"], strict=True):
                    assert seen == pytest.approx(wanted, abs=1e-5, rel=1e-5), layout
            for name, tensor in expected["weights"].items():
                assert (results[0]["weights"][name] - tensor).abs().max() < 1e-5, (layout, name)
        for model in ("policy", "critic"):
            moved = [
                float((tensor - initial[name]).abs().max())
                for (owner, name), tensor in expected["weights"].items()
                if owner == model and ".experts." in name
            ]
            assert min(moved) > 1e-4, model
    of_critic = ("train/value_loss", "train/critic_grad_norm", "train/explained_variance", "train/return_mean")
    assert {name: first[True][name] for name in of_critic} == {name: first[False][name] for name in of_critic}
    differences = [first[replay]["train/train_rollout_logprob_abs_diff"] for replay in (True, False)]
    assert abs(differences[0] - differences[1]) > 1e-3
    assert 0.5 < first[True]["train/routing_replay_coverage"] < 1
