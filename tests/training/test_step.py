"""One optimizer step is the same, whatever the parallel layout, the microbatches and the packing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.ranks import Ranks, tiny_config
from tests.training.test_model import make_model
from vime.buffer.chunk import write_chunk
from vime.buffer.manifest import CHUNKS, Manifest, entries
from vime.buffer.sample import Group, Sample
from vime.run.directory import RunDir

LEARNING_RATE = 1e-3
# Adam's first step is learning_rate * g / (|g| + eps): with the usual eps of 1e-8 it turns the rounding residue of a
# zero gradient into a whole step, and would compare noise.
ADAM_EPS = 1e-4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2_plain_optimizer": (2, {"distributed_optimizer": False}),
    "tp2": (2, {"tensor_parallel": 2}),
    "tp2_sp": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "small_microbatches": (1, {"max_tokens_per_microbatch": 40}),
    "dp2_small_microbatches": (2, {"max_tokens_per_microbatch": 40}),
    "pp2_small_microbatches": (2, {"pipeline_parallel": 2, "max_tokens_per_microbatch": 40}),
    "one_token_chunks": (1, {"logprob_chunk_tokens": 1}),
    "pp2_vpp2": (2, {"pipeline_parallel": 2, "virtual_stages": 2, "max_tokens_per_microbatch": 40}),
    "cp2": (2, {"context_parallel": 2}),
    "tp2_cp2": (4, {"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 2}),
    "recompute_full": (1, {"recompute": "full"}),
    "recompute_selective": (1, {"recompute": "selective"}),
}
MOE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "etp2": (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2}),
    "pp2_vpp2_ep2": (
        4,
        {"pipeline_parallel": 2, "virtual_stages": 2, "expert_parallel": 2, "max_tokens_per_microbatch": 40},
    ),
    "cp2_ep2": (2, {"context_parallel": 2, "expert_parallel": 2}),
    "ep2": (2, {"expert_parallel": 2}),
    "ep2_plain_optimizer": (2, {"expert_parallel": 2, "distributed_optimizer": False}),
    "tp2_ep2_recompute_full": (
        2,
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "recompute": "full"},
    ),
    "tp2_ep2_dp2": (4, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
    "ep2_etp2": (
        4,
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "expert_tensor_parallel": 2},
    ),
}


def write_batch(
    folder: Path,
    prompts: int = 4,
    each: int = 2,
    seed: int = 3,
    logprob: tuple[float, float] = (-3.0, 1.0),
    spanning: bool = False,
) -> Manifest:
    """A committed batch of groups with random tokens, lengths, masks and rewards, as the generator would leave it.

    logprob: mean and deviation of the rollout's. spanning: version 1 came upon the last response of each group.
    """
    generator = np.random.default_rng(seed)
    groups = []
    for prompt in range(prompts):
        samples = []
        for number in range(each):
            total = int(generator.integers(6, 36))
            prompt_length = int(generator.integers(1, total - 1))
            response = total - prompt_length
            mask = (generator.random(response) < 0.8).astype(np.uint8)
            mask[0] = 1
            rows = [[0, 0], [response // 2, 1]] if spanning and number == each - 1 and response > 1 else [[0, 0]]
            samples.append(
                Sample(
                    token_ids=generator.integers(0, 264, total, dtype=np.int32),
                    prompt_length=prompt_length,
                    loss_mask=mask,
                    rollout_logprobs=generator.normal(*logprob, response).astype(np.float32),
                    versions=np.array(rows, dtype=np.int32),
                    reward=float(generator.random()),
                    finish_reason="stop",
                )
            )
        groups.append(Group(uid=f"p{prompt}", index=prompt, samples=tuple(samples)))
    chunks = folder / "buffer" / CHUNKS
    chunks.mkdir(parents=True)
    info = write_chunk(chunks, "c0.safetensors", groups)
    return Manifest(step=1, version=0, chunks=(info,), samples=tuple(entries("c0.safetensors", groups)))


def _step(
    rank: int, store: Any, world_size: int, model: Path, run: Path, manifest: Manifest, sections: dict[str, Any]
) -> dict[str, Any]:
    from vime.buffer.reader import BufferReader
    from vime.training import batch, parallel
    from vime.training.learner import Learner
    from vime.training.weights import hf_export

    config = tiny_config(
        **{
            **sections,
            "training": {
                "ranks": world_size,
                "learning_rate": LEARNING_RATE,
                "adam_eps": ADAM_EPS,
                **sections.get("training", {}),
            },
        }
    )
    parallel.initialize(config, store, rank, world_size)
    learner = Learner(config, model)
    loaded = batch.load(manifest, BufferReader(RunDir(run), config.buffer), config, version=0)
    metrics = learner.train(loaded)
    weights = dict(hf_export.export(learner.policy, torch.float32)) if parallel.is_leading() else {}
    return {"metrics": metrics, "weights": weights, "microbatches": len(loaded.microbatches)}


@dataclass
class Prepared:
    """Models and a batch, and the step of one rank with each of them."""

    folder: Path
    manifest: Manifest
    expected: dict[tuple[str, str], dict[str, Any]]

    def model(self, family: str) -> Path:
        """The tiny model of a family."""
        model = self.folder / family
        if not model.exists():
            make_model(family, model)
        return model


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("step")
    return Prepared(folder, write_batch(folder), {})


ALGORITHMS = {"grpo": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}, "sft": {"name": "sft"}}
CASES = [
    *(("qwen3", layout, algorithm) for layout in LAYOUTS for algorithm in ALGORITHMS),
    *((family, layout, "grpo") for family in ("qwen3_moe", "glm4_moe") for layout in MOE_LAYOUTS),
]


@pytest.mark.parametrize(("family", "layout", "algorithm"), CASES)
def test_a_step_is_the_same_in_every_layout(
    ranks: Ranks, prepared: Prepared, family: str, layout: str, algorithm: str
) -> None:
    model, run, manifest = prepared.model(family), prepared.folder, prepared.manifest
    rollout = {"engines": 0} if algorithm == "sft" else {"temperature": 0.7}
    sections = {"algorithm": ALGORITHMS[algorithm], "rollout": rollout}
    if (family, algorithm) not in prepared.expected:
        (prepared.expected[family, algorithm],) = ranks.run(1, _step, model, run, manifest, sections)
    expected = prepared.expected[family, algorithm]
    world_size, training = (LAYOUTS if family == "qwen3" else MOE_LAYOUTS)[layout]
    results = ranks.run(world_size, _step, model, run, manifest, {**sections, "training": training})
    assert (results[0]["microbatches"] > 1) == ("max_tokens_per_microbatch" in training)
    for result in results:
        for name, value in expected["metrics"].items():
            assert result["metrics"][name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
    moved = 0.0
    for name, tensor in expected["weights"].items():
        moved = max(moved, float((tensor - _initial(model)[name]).abs().max()))
        assert (results[0]["weights"][name] - tensor).abs().max() < 1e-5, name
    assert moved > 0.5 * LEARNING_RATE  # 1e-5 is far below what the step changed


def _initial(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")
