"""A response that was sampled by several versions: each token is stale or not by its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.ranks import Ranks, tiny_config
from tests.training.test_model import TINY
from tests.training.test_step import write_batch
from vime.buffer.manifest import Manifest
from vime.buffer.sample import Sample
from vime.config import Algorithm
from vime.models.tiny import make_tiny
from vime.run.directory import RunDir
from vime.training import cpu
from vime.training.pack import PackLayout

E = math.exp(0.25)
OWN = {"old_logprobs": "trainer"}
ENGINES = {"old_logprobs": "rollout"}


def spanning(versions: list[list[int]], logprobs: list[float], mask: list[int]) -> Sample:
    """A response of these to a prompt of one token."""
    return Sample(
        token_ids=np.arange(1 + len(mask), dtype=np.int32),
        prompt_length=1,
        loss_mask=np.array(mask, np.uint8),
        rollout_logprobs=np.array(logprobs, np.float32),
        versions=np.array(versions, np.int32),
        reward=0.0,
        finish_reason="stop",
    )


@pytest.mark.parametrize("place", [PackLayout(), PackLayout(context_rank=1, context_size=2)])
@pytest.mark.parametrize(
    ("rule", "losses", "gradient"),
    [
        # Version 3 sampled the first two trained tokens, so that their ratios are to the engine's logprobs: e**0.5,
        # which is clipped at 1.28, and e**-0.25. The others are version 4's, which is trained: 1.
        ({}, [-1.28, -1 / E, -1, 1, 1], [0, -1 / E, -1, 1, 1]),
        (OWN, [-1, -1, -1, 1, 1], [-1, -1, -1, 1, 1]),
        (ENGINES, [-1.28, -1 / E, -1 / E, 1, 0.8], [0, -1 / E, -1 / E, 1, 0]),
        # Weights e**-0.25, 1 and e**-0.25 of the tokens whose ratio is to the trainer's own logprob.
        (
            {"importance_sampling": "truncated", "importance_high": 0.9},
            [-1.28, -1 / E, -1 / E, 0.9, 1 / E],
            [0, -1 / E, -1 / E, 0.9, 1 / E],
        ),
        # A response's weight is that of these tokens: e**-0.25 for both, where all tokens of the first give 1.
        (
            {"importance_sampling": "sequence_mask", "importance_low": 0.7, "importance_high": 0.9},
            [-1.28, -1 / E, -1 / E, 1 / E, 1 / E],
            [0, -1 / E, -1 / E, 1 / E, 1 / E],
        ),
    ],
)
def test_hand_computed(place: PackLayout, rule: dict[str, Any], losses: list[float], gradient: list[float]) -> None:
    cpu.enable()
    from vime.training.batch import Microbatch
    from vime.training.experience import Experience
    from vime.training.loss import microbatch_loss
    from vime.training.pack import pack

    packed = pack(
        [
            spanning([[0, 3], [3, 4]], [-1.0, -2.0, math.nan, -0.5], [1, 1, 0, 1]),
            spanning([[0, 4]], [-1.5, -1.0], [1, 1]),
        ],
        place,
    )
    microbatch = Microbatch(
        packed,
        samples=(0, 1),
        owners=packed.sample,
        loss_weights=torch.full((5,), 0.2),
        metric_weights=torch.full((5,), 0.2),
        stale=packed.versions != 4,
    )
    logprobs = torch.tensor([-0.5, -2.25, -0.75, -1.5, -1.25], requires_grad=True)
    experience = Experience(microbatch, advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]))
    output = torch.stack([logprobs, torch.zeros(5)])
    loss, metrics = microbatch_loss(output, experience, Algorithm.model_validate(rule))
    loss.backward()
    assert 5 * loss.item() == pytest.approx(sum(losses), abs=1e-6)
    assert logprobs.grad is not None
    assert (5 * logprobs.grad).tolist() == pytest.approx(gradient, abs=1e-6)
    # Of the three tokens that version 4 sampled: weighted sum and weight of the mean, and the maximum.
    place = [name for name, reduction in metrics.layout if reduction == "mean"].index(
        "train/train_rollout_logprob_abs_diff"
    )
    assert metrics.added[2 * place : 2 * place + 2].tolist() == pytest.approx([(0.25 + 0 + 0.25) / 5, 0.6])
    extremes = [name for name, reduction in metrics.layout if reduction == "max"]
    assert float(metrics.largest[extremes.index("train/train_rollout_logprob_abs_diff_max")]) == 0.25


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("staleness")
    make_tiny(TINY, folder / "hf")
    return folder, write_batch(folder, logprob=(-math.log(264), 0.7), spanning=True)


def _step(
    rank: int, store: Any, world_size: int, folder: Path, manifest: Manifest, training: dict[str, Any], version: int
) -> tuple[dict[str, float], list[Sample], list[torch.Tensor]]:
    """A step, its samples, and the policy's logprobs of their trained tokens before it."""
    from vime.buffer.reader import BufferReader
    from vime.training import batch, parallel
    from vime.training.learner import Learner

    config = tiny_config(training={"ranks": world_size, **training})
    parallel.initialize(config, store, rank, world_size)
    learner = Learner(config, folder / "hf")
    reader = BufferReader(RunDir(folder), config.buffer)
    samples = reader.samples(manifest, range(len(manifest.samples)))
    before = learner.score(samples, config.rollout.temperature)
    return learner.train(batch.load(manifest, reader, config, version)), samples, before


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("world_size", "training"),
    [
        (1, {}),
        (2, {"max_tokens_per_microbatch": 40}),
        (2, {"context_parallel": 2}),
        (2, {"tensor_parallel": 2, "sequence_parallel": True}),
        (2, {"pipeline_parallel": 2, "max_tokens_per_microbatch": 60}),
    ],
)
def test_a_step_tells_a_responses_tokens_apart(
    ranks: Ranks, prepared: tuple[Path, Manifest], world_size: int, training: dict[str, Any], version: int
) -> None:
    for metrics, samples, before in ranks.run(world_size, _step, *prepared, training, version):
        trained = [sample.loss_mask == 1 for sample in samples]
        engine = np.concatenate([s.rollout_logprobs[mask] for s, mask in zip(samples, trained, strict=True)])
        versions = np.concatenate([s.version_per_token()[mask] for s, mask in zip(samples, trained, strict=True)])
        rewards = np.array([sample.reward for sample in samples]).reshape(-1, 2)
        centred = (rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, ddof=1, keepdims=True)
        advantages = np.repeat(centred.flatten(), [mask.sum() for mask in trained])
        own = torch.cat(before).numpy()
        fresh = versions == version
        assert 0.1 < fresh.mean() < 0.9 if version == 1 else not fresh.any()
        ratio = np.exp(np.where(fresh, 0, own - engine))
        losses = -np.minimum(ratio * advantages, ratio.clip(0.8, 1.28) * advantages)
        assert metrics["train/pg_loss"] == pytest.approx(losses.mean(), abs=1e-5)
        assert metrics["train/ois"] == pytest.approx(ratio.mean(), abs=1e-5)
        if version == 1:
            difference = np.abs(own - engine)[fresh].mean()
            assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(difference, abs=1e-5)
        else:  # no token of the batch is the trained version's: there is nothing to compare
            assert "train/train_rollout_logprob_abs_diff" not in metrics
