"""A checkpoint goes on as if nothing had been interrupted, in any layout, and a kill never costs the one before."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.ranks import Ranks, tiny_config
from tests.training.test_model import TINY, make_model
from tests.training.test_step import ADAM_EPS, write_batch
from vime.buffer.manifest import Manifest
from vime.errors import UserError
from vime.models.tiny import make_tiny
from vime.run.checkpoints import MARKER
from vime.run.directory import RunDir

STEPS = 4
TRAINING = {
    "learning_rate": 1e-3,
    "adam_eps": ADAM_EPS,
    "warmup_steps": 3,  # each step has its own learning rate
    "schedule": "cosine",
    "steps": STEPS,
    "weight_decay": 0.1,
}


def _train(
    rank: int,
    store: Any,
    world_size: int,
    model: Path,
    folder: Path,
    batches: list[tuple[Path, Manifest]],
    training: dict[str, Any],
    *,
    until: int,
    resume: bool,
    sections: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Steps until `until`, one batch each, then a save. Loads first when `resume`."""
    from vime.buffer.reader import BufferReader
    from vime.training import batch, parallel
    from vime.training.checkpoint.checkpoints import Checkpoints
    from vime.training.learner import Learner
    from vime.training.weights import hf_export

    config = tiny_config(training={**TRAINING, "ranks": world_size, **training}, **(sections or {}))
    parallel.initialize(config, store, rank, world_size)
    learner = Learner(config, model)
    checkpoints = Checkpoints(learner, folder, config, attempt=1)
    done, loaded = 0, None
    if resume:
        loaded = checkpoints.load()
        done = loaded.step
    metrics = []
    for run, manifest in batches[done:until]:
        metrics.append(learner.train(batch.load(manifest, BufferReader(RunDir(run), config.buffer), config, version=0)))
        torch.rand(1 + rank)  # a random state that a load must bring back
    saved = checkpoints.save(until, {"epoch": 0, "position": until})
    weights = dict(hf_export.export(learner.policy, torch.float32)) if parallel.is_leading() else {}
    return {
        "metrics": metrics,
        "weights": weights,
        "saved": saved,
        "loaded": loaded,
        "random": torch.get_rng_state(),
        "lr": learner.optimizer.param_groups[0]["lr"],
    }


def _tensors(rank: int, store: Any, world_size: int, path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole: weights, master weights and Adam's moments."""
    from megatron.core import dist_checkpointing

    from vime.training import parallel

    parallel.initialize(tiny_config(training={"ranks": 1}), store, rank, world_size)
    return {k: v for k, v in dist_checkpointing.load_plain_tensors(str(path)).items() if isinstance(v, torch.Tensor)}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Path, Manifest]]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_tiny(TINY, folder / "hf")
    batches = []
    for step in range(STEPS):
        run = folder / f"run{step}"
        batches.append((run, write_batch(run, seed=10 + step)))
    return folder / "hf", batches


LAYOUTS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "dp2_tp2_pp2_one": [
        (2, {}),
        (2, {"tensor_parallel": 2}),
        (2, {"pipeline_parallel": 2}),
        (1, {}),
    ],
    "tp2_sp_dp2_pp2_dp2": [
        (2, {"tensor_parallel": 2, "sequence_parallel": True}),
        (2, {}),
        (2, {"pipeline_parallel": 2}),
        (2, {}),
    ],
    "plain_optimizer": [
        (2, {"distributed_optimizer": False}),
        (1, {"distributed_optimizer": False}),
        (2, {"distributed_optimizer": False, "tensor_parallel": 2}),
        (2, {"distributed_optimizer": False, "pipeline_parallel": 2}),
    ],
    "vpp2_cp2_one_vpp2": [
        (2, {"pipeline_parallel": 2, "virtual_stages": 2}),
        (2, {"context_parallel": 2}),
        (1, {}),
        (2, {"pipeline_parallel": 2, "virtual_stages": 2}),
    ],
    "glm4_moe-ep2_tp2ep2_etp2_vpp2": [
        (2, {"expert_parallel": 2}),
        (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
        (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2}),
        (2, {"pipeline_parallel": 2, "virtual_stages": 2}),
    ],
    "qwen3_moe-one_ep2_dp2_pp2ep2": [
        (1, {}),
        (2, {"expert_parallel": 2}),
        (2, {}),
        (4, {"pipeline_parallel": 2, "expert_parallel": 2}),
    ],
}


@pytest.mark.parametrize("chain", LAYOUTS)
def test_each_step_in_another_layout_is_an_uninterrupted_run(
    ranks: Ranks, prepared: tuple[Path, list[tuple[Path, Manifest]]], tmp_path: Path, chain: str
) -> None:
    model, batches = prepared
    if "moe" in chain:
        model = tmp_path / "hf"
        make_model(chain.split("-")[0], model)
    plain = {"distributed_optimizer": False} if chain == "plain_optimizer" else {}
    (expected,) = ranks.run(1, _uninterrupted, model, tmp_path / "whole", batches, plain)
    parts = []
    for step, (world_size, training) in enumerate(LAYOUTS[chain], start=1):
        results = ranks.run(world_size, _part, model, tmp_path / "parts", batches, training, step)
        parts.append(results[0])
        for result in results:
            assert result["metrics"] == [pytest.approx(expected["metrics"][step - 1], abs=1e-5, rel=1e-5)]
    assert [part["metrics"][0]["train/lr"] for part in parts] == [m["train/lr"] for m in expected["metrics"]]
    assert len({m["train/lr"] for m in expected["metrics"]}) == STEPS  # a lost schedule would show
    assert parts[-1]["lr"] == expected["lr"]
    for name, tensor in expected["weights"].items():
        assert (parts[-1]["weights"][name] - tensor).abs().max() < 1e-5, name
    (whole,) = ranks.run(1, _tensors, tmp_path / "whole" / f"step_{STEPS}")
    (last,) = ranks.run(1, _tensors, tmp_path / "parts" / f"step_{STEPS}")
    assert whole.keys() == last.keys()
    assert any("exp_avg_sq" in name for name in whole)
    for name, tensor in whole.items():
        assert (last[name] - tensor).abs().max() < 1e-5, name
    moved = max(float(tensor.abs().max()) for name, tensor in whole.items() if "exp_avg." in name)
    assert moved > 1e-3  # moments that 1e-5 can tell from lost ones


def _uninterrupted(
    rank: int, store: Any, world_size: int, model: Path, folder: Path, batches: Any, training: Any
) -> Any:
    return _train(rank, store, world_size, model, folder, batches, training, until=STEPS, resume=False)


def _part(
    rank: int, store: Any, world_size: int, model: Path, folder: Path, batches: Any, training: Any, step: int
) -> Any:
    return _train(rank, store, world_size, model, folder, batches, training, until=step, resume=step > 1)


@pytest.mark.parametrize("distributed", [True, False])
def test_bfloat16_goes_on_exactly(
    ranks: Ranks, prepared: tuple[Path, list[tuple[Path, Manifest]]], tmp_path: Path, distributed: bool
) -> None:
    """Its master weights are float32: going on from the rounded ones would show."""
    model, batches = prepared
    layout = {"dtype": "bfloat16", "distributed_optimizer": distributed}
    whole = ranks.run(2, _uninterrupted, model, tmp_path / "whole", batches[:2], layout)
    for step in (1, 2):
        parts = ranks.run(2, _part, model, tmp_path / "parts", batches, layout, step)
    assert parts[0]["metrics"] == whole[0]["metrics"][1:]
    for name, tensor in whole[0]["weights"].items():
        assert torch.equal(parts[0]["weights"][name], tensor), name


class GroupAdam(torch.optim.Optimizer):
    """Adam that counts its steps in the parameter groups, from its first step on, as Transformer Engine's does."""

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = count = group.get("step", 0) + 1
            low, high = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter))
                state["exp_avg"].lerp_(parameter.grad, 1 - low)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - high)
                deviation = (state["exp_avg_sq"] / (1 - high**count)).sqrt() + group["eps"]
                parameter *= 1 - group["lr"] * group["weight_decay"]
                parameter -= group["lr"] * state["exp_avg"] / (1 - low**count) / deviation


def _with_group_adam(rank: int, store: Any, world_size: int, function: Any, *arguments: Any) -> Any:
    """`function` where Megatron finds this Adam in place of torch's, as it finds Transformer Engine's on a GPU."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    with pytest.MonkeyPatch.context() as patch:
        for module in (optimizer, distrib_optimizer):
            patch.setattr(module, "Adam", GroupAdam)
        patch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
        patch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
        patch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
        return function(rank, store, world_size, *arguments)


@pytest.mark.parametrize("distributed", [True, False])
def test_a_count_of_steps_in_the_parameter_groups_comes_back(
    ranks: Ranks, prepared: tuple[Path, list[tuple[Path, Manifest]]], tmp_path: Path, distributed: bool
) -> None:
    model, batches = prepared
    layout = {"distributed_optimizer": distributed}
    (whole,) = ranks.run(1, _with_group_adam, _uninterrupted, model, tmp_path / "whole", batches[:2], layout)
    for step in (1, 2):
        (parts,) = ranks.run(1, _with_group_adam, _part, model, tmp_path / "parts", batches, layout, step)
    assert parts["metrics"] == whole["metrics"][1:]
    for name, tensor in whole["weights"].items():
        assert torch.equal(parts["weights"][name], tensor), name


def test_random_states_come_back_in_the_same_layout(
    ranks: Ranks, prepared: tuple[Path, list[tuple[Path, Manifest]]], tmp_path: Path
) -> None:
    model, batches = prepared
    before = ranks.run(2, _part, model, tmp_path, batches, {"tensor_parallel": 2}, 1)
    after = ranks.run(2, _random_after_load, model, tmp_path, {"tensor_parallel": 2})
    assert not torch.equal(before[0]["random"], before[1]["random"])  # each rank has its own
    for saved, (loaded, state) in zip(before, after, strict=True):
        assert loaded.same_layout
        assert (loaded.step, loaded.cursor, loaded.attempt) == (1, {"epoch": 0, "position": 1}, 1)
        assert torch.equal(state, saved["random"])
    for loaded, _ in ranks.run(1, _random_after_load, model, tmp_path, {}):
        assert not loaded.same_layout


def _random_after_load(
    rank: int, store: Any, world_size: int, model: Path, folder: Path, training: dict[str, Any]
) -> tuple[Any, torch.Tensor]:
    from vime.training import parallel
    from vime.training.checkpoint.checkpoints import Checkpoints
    from vime.training.learner import Learner

    config = tiny_config(training={**TRAINING, "ranks": world_size, **training})
    parallel.initialize(config, store, rank, world_size)
    torch.rand(7)
    return Checkpoints(Learner(config, model), folder, config, attempt=2).load(), torch.get_rng_state()


@pytest.mark.parametrize("distributed", [True, False])
def test_a_stop_before_the_first_step_can_be_resumed(
    ranks: Ranks, prepared: tuple[Path, list[tuple[Path, Manifest]]], tmp_path: Path, distributed: bool
) -> None:
    model, batches = prepared
    layout = {"distributed_optimizer": distributed}
    ranks.run(1, _part, model, tmp_path, batches, layout, 0)
    (resumed,) = ranks.run(1, _resumed_at_zero, model, tmp_path, batches, layout)
    (fresh,) = ranks.run(1, _part, model, tmp_path / "fresh", batches, layout, 1)
    assert resumed["loaded"].step == 0
    assert resumed["metrics"] == fresh["metrics"]
    for name, tensor in fresh["weights"].items():
        assert torch.equal(resumed["weights"][name], tensor), name


def _resumed_at_zero(
    rank: int, store: Any, world_size: int, model: Path, folder: Path, batches: Any, training: Any
) -> Any:
    return _train(rank, store, world_size, model, folder, batches, training, until=1, resume=True)


def test_every_rank_refuses_to_resume_from_nothing(
    ranks: Ranks, prepared: tuple[Path, list[tuple[Path, Manifest]]], tmp_path: Path
) -> None:
    lines = ranks.run(2, _refusal, prepared[0], tmp_path / "none")
    assert (
        lines
        == [f"cannot resume: {tmp_path}/none has no complete checkpoint; training.save_interval is 0, which saves none"]
        * 2
    )


def _refusal(rank: int, store: Any, world_size: int, model: Path, folder: Path) -> str:
    try:
        _random_after_load(rank, store, world_size, model, folder, {})
    except UserError as error:
        return str(error)
    return "it started"


def test_a_changed_learning_rate_is_this_runs(
    ranks: Ranks, prepared: tuple[Path, list[tuple[Path, Manifest]]], tmp_path: Path
) -> None:
    model, batches = prepared
    ranks.run(1, _part, model, tmp_path, batches, {}, 1)
    (resumed,) = ranks.run(1, _part, model, tmp_path, batches, {"learning_rate": 2e-3}, 2)
    (usual,) = ranks.run(1, _uninterrupted, model, tmp_path / "usual", batches, {})
    assert resumed["metrics"][0]["train/lr"] == pytest.approx(
        # The place in the warm-up is kept: from learning_rate / 3 to learning_rate.
        2 * usual["metrics"][1]["train/lr"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("point", ["planned", "half_written", "written"])
def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(
    ranks: Ranks, prepared: tuple[Path, list[tuple[Path, Manifest]]], tmp_path: Path, point: str
) -> None:
    model, batches = prepared
    folder = tmp_path / "checkpoints"
    ranks.run(1, _part, model, folder, batches, {}, 1)
    mortal = Ranks(1, tmp_path)
    try:
        with pytest.raises(AssertionError, match="the process ended"):
            mortal.run(1, _killed_in_save, model, folder, batches, point)
    finally:
        mortal.close()
    left = {path.name for path in (folder / ".step_2.tmp").iterdir()}
    assert (".metadata" in left, MARKER in left) == (point == "written", False)
    (resumed,) = ranks.run(1, _part, model, folder, batches, {}, 2)
    assert resumed["loaded"].step == 1
    assert [one["reason"] for one in resumed["loaded"].incomplete] == ["its saving was interrupted"]
    assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_2"]


def _killed_in_save(
    rank: int, store: Any, world_size: int, model: Path, folder: Path, batches: Any, point: str
) -> None:
    from vime.training.checkpoint import checkpoints, writer

    def end(*arguments: Any, **keywords: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    write = writer._write
    if point == "planned":
        writer._write = end  # type: ignore[assignment]
    elif point == "half_written":
        writer._write = lambda writer, buckets: end(write(writer, buckets[:1]))  # type: ignore[assignment, return-value]
    else:
        checkpoints.commit = end  # type: ignore[assignment]
    _train(rank, store, world_size, model, folder, batches, {}, until=2, resume=True)
