"""A sample refuses parts that do not fit together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.buffer.made import make_sample
from vime.buffer.sample import Group

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_length": 8}, "outside the 7 tokens"),
        ({"token_ids": np.zeros(7, np.int64)}, "token_ids is int64"),
        ({"loss_mask": np.zeros(3, np.uint8)}, r"loss_mask is uint8\[3\], expected uint8\[4\]"),
        ({"loss_mask": np.full(4, 2, np.uint8)}, "other than 0 and 1"),
        ({"rollout_logprobs": np.zeros(4)}, "rollout_logprobs is float64"),
        ({"teacher_logprobs": np.zeros(3, np.float32)}, r"teacher_logprobs is float32\[3\], expected float32\[4\]"),
        ({"teacher_logprobs": np.zeros(4)}, "teacher_logprobs is float64"),
        ({"versions": np.empty((0, 2), np.int32)}, "0 version ranges for 4"),
        ({"versions": np.array([[1, 0]], np.int32)}, "start at"),
        ({"versions": np.array([[0, 0], [4, 1]], np.int32)}, "start at"),
        ({"versions": np.array([[0, 0], [2, 1], [2, 2]], np.int32)}, "start at"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"routed_experts": np.zeros((2, 7, 2), np.uint8)}, r"expected integers \[layers, 6, top-k\] for 7 tokens"),
        ({"routed_experts": np.zeros((2, 6, 2), np.float32)}, "expected integers"),
        ({"first_route": 1}, "first_route is 1, of 0 positions"),
        ({"routed_experts": np.zeros((2, 6, 2), np.uint8), "first_route": 7}, "first_route is 7, of 6 positions"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_sample(RNG, 3, 4, **changes)


def test_versions_of_tokens() -> None:
    sample = make_sample(RNG, 2, 5, versions=np.array([[0, 3], [2, 4], [4, 6]], np.int32))
    assert sample.version_per_token().tolist() == [3, 3, 4, 4, 6]
    assert (sample.oldest_version, sample.newest_version) == (3, 6)
    empty = make_sample(RNG, 2, 0)
    assert empty.version_per_token().tolist() == []
    assert (empty.oldest_version, empty.newest_version, empty.response_length) == (-1, -1, 0)


def test_a_group_has_samples() -> None:
    with pytest.raises(ValueError, match="group p has no samples"):
        Group("p", 0, ())
