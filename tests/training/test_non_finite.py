"""A gradient that is not finite ends the step before the weights change, and says where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.ranks import Ranks, tiny_config
from tests.training.test_model import TINY
from tests.training.test_step import write_batch
from vime.buffer.manifest import Manifest
from vime.models.tiny import make_tiny
from vime.run.directory import RunDir

SAMPLE = 5
"""Whose rewards alone are far from 0, by which the loss knows it."""


def infinite_slope(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """A user's loss that is finite everywhere, and whose gradient by the tokens of one sample is not."""
    return -logprobs + torch.where(advantages > 100, logprobs - logprobs.detach(), 1.0).sqrt()


def plain_rewards(rewards: Tensor) -> Tensor:
    """A user's advantage that only tells one sample from the others."""
    return torch.where(torch.arange(len(rewards)) == SAMPLE, 1000.0, 1.0)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("non_finite")
    make_tiny(TINY, folder / "hf")
    return folder, write_batch(folder)


def _step(
    rank: int, store: Any, world_size: int, folder: Path, manifest: Manifest, algorithm: Any, training: Any
) -> tuple[str, bool, dict[str, float]]:
    """The error, whether the weights are as before, and the metrics."""
    from vime.buffer.reader import BufferReader
    from vime.training import batch, parallel
    from vime.training.learner import Learner

    config = tiny_config(algorithm=algorithm, training={"ranks": world_size, **training})
    parallel.initialize(config, store, rank, world_size)
    learner = Learner(config, folder / "hf")
    before = [parameter.clone() for chunk in learner.policy for parameter in chunk.parameters()]
    message, metrics = "", {}
    try:
        metrics = learner.train(batch.load(manifest, BufferReader(RunDir(folder), config.buffer), config, version=0))
    except RuntimeError as error:
        message = str(error)
    after = [parameter for chunk in learner.policy for parameter in chunk.parameters()]
    return message, all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), metrics


@pytest.mark.parametrize(
    ("world_size", "training"),
    [
        (1, {"clip_grad": 0.0}),
        (2, {"max_tokens_per_microbatch": 40}),
        (2, {"pipeline_parallel": 2}),
        (2, {"distributed_optimizer": False, "tensor_parallel": 2}),
    ],
)
def test_it_is_refused_on_every_rank_before_anything_changes(
    ranks: Ranks, prepared: tuple[Path, Manifest], world_size: int, training: dict[str, Any]
) -> None:
    module = "tests.training.test_non_finite"
    rule = {"loss": f"{module}:infinite_slope", "advantage": f"{module}:plain_rewards"}
    for message, unchanged, _ in ranks.run(world_size, _step, *prepared, rule, training):
        assert unchanged
        assert message.startswith("step 1: the gradient's norm is "), message
        assert f"from sample {SAMPLE} of the batch" in message
        assert ".weight, " in message, "a parameter is named"


def test_the_norm_is_known_without_a_limit(ranks: Ranks, prepared: tuple[Path, Manifest]) -> None:
    norms = []
    for limit in (0.0, 1.0):
        ((message, _, metrics),) = ranks.run(1, _step, *prepared, {}, {"clip_grad": limit})
        assert message == ""
        norms.append(metrics["train/grad_norm"])
    assert norms[0] == norms[1] > 1e-3
