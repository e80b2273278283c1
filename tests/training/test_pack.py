"""Laying samples end to end, and that a packed sample is computed as if it were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.ranks import Ranks, tiny_config
from tests.training.test_model import TINY, samples
from vime.buffer.sample import Sample
from vime.models.tiny import make_tiny
from vime.training import cpu
from vime.training.pack import IGNORE, PackLayout


def _sample(token_ids: list[int], prompt_length: int, mask: list[int]) -> Sample:
    return Sample(
        token_ids=np.array(token_ids, np.int32),
        prompt_length=prompt_length,
        loss_mask=np.array(mask, np.uint8),
        rollout_logprobs=-np.arange(len(mask), dtype=np.float32),
        versions=np.array([[i, 3 + i] for i in range(min(len(mask), 2))], np.int32).reshape(-1, 2),
        reward=0.0,
        finish_reason="stop",
    )


def _layout(rank: int, store: Any, world_size: int) -> dict[str, Any]:
    from vime.training.pack import pack

    packed = pack([_sample([5, 6, 7, 8], 2, [1, 0]), _sample([9, 10, 11], 1, [1, 1])], PackLayout(tensor=4))
    return {
        "tokens": packed.token_ids.tolist(),
        "positions": packed.position_ids.tolist(),
        "labels": packed.labels.tolist(),
        "bounds": packed.params.cu_seqlens_q.tolist(),
        "sample": packed.sample.tolist(),
        "rollout": packed.rollout_logprobs.tolist(),
        "versions": packed.versions.tolist(),
        "empty": pack([], PackLayout(tensor=2)).labels.tolist(),
    }


def test_layout(ranks: Ranks) -> None:
    (got,) = ranks.run(1, _layout)
    assert got["tokens"] == [5, 6, 7, 8, 9, 10, 11, 0]
    assert got["positions"] == [0, 1, 2, 3, 0, 1, 2, 0]
    # at position 1 of the first sample its token 7 is predicted; 8 is masked; 10 and 11 are predicted by 9 and 10
    assert got["labels"] == [IGNORE, 7, IGNORE, IGNORE, 10, 11, IGNORE, IGNORE]
    assert got["bounds"] == [0, 4, 7, 8]
    assert got["sample"] == [0, 1, 1]
    assert got["rollout"] == [0.0, 0.0, -1.0]
    assert got["versions"] == [3, 3, 4]
    assert got["empty"] == [IGNORE, IGNORE]


def test_a_first_token_cannot_be_trained() -> None:
    cpu.enable()
    from vime.training.pack import pack

    with pytest.raises(ValueError, match="sample 0 trains its first token"):
        pack([_sample([5, 6], 0, [1, 1])])


def _score(rank: int, store: Any, world_size: int, folder: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    from vime.training import parallel
    from vime.training.learner import Learner

    config = tiny_config(training={"ranks": world_size, "pipeline_parallel": world_size})
    parallel.initialize(config, store, rank, world_size)
    learner = Learner(config, folder)
    return learner.score(samples(), 1.0), [learner.score([sample], 1.0)[0] for sample in samples()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_packed_and_alone_agree(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    make_tiny(TINY, tmp_path / "hf")
    for packed, alone in ranks.run(world_size, _score, tmp_path / "hf"):
        for a, b in zip(packed, alone, strict=True):
            assert a.shape == b.shape
            assert a.numel() > 0
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
