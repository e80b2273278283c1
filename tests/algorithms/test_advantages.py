"""Group-relative advantages against arithmetic done by hand, and what must hold for any rewards."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vime.algorithms.advantages import group_advantages, leave_one_out_advantages

Advantages = Callable[[Tensor, Tensor, bool], Tensor]
BOTH: list[Advantages] = [group_advantages, leave_one_out_advantages]


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def one_group(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def test_grpo_by_hand() -> None:
    # Group 7: rewards 0, 1, 2, 5. Mean 8/4 = 2. Centred -2, -1, 0, 3; squares 4 + 1 + 0 + 9 = 14; 14/3 = 4.6667,
    # root 2.160247. -2/2.160247 = -0.925820, -0.462910, 0, 1.388730.
    # Group 3: rewards 1, 0. Mean 0.5, squares 0.25 + 0.25 = 0.5 over 1, root 0.707107. +-0.5/0.707107 = +-0.707107.
    rewards, groups = f32(0, 1, 1, 2, 5, 0), torch.tensor([7, 3, 7, 7, 7, 3])
    seen = group_advantages(rewards, groups, True)
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen, f32(-0.925820, 0.707107, -0.462910, 0, 1.388730, -0.707107), atol=1e-6, rtol=0)
    torch.testing.assert_close(group_advantages(rewards, groups, False), f32(-2, 0.5, -1, 0, 3, -0.5))


def test_rloo_by_hand() -> None:
    # Rewards 0, 1, 5. The others' means: 6/2 = 3, 5/2 = 2.5, 1/2 = 0.5; advantages -3, -1.5, 4.5.
    # The others' deviations: of (1, 5) sqrt(8) = 2.828427, of (0, 5) sqrt(12.5) = 3.535534, of (0, 1) sqrt(0.5) =
    # 0.707107.
    groups = one_group(3)
    torch.testing.assert_close(leave_one_out_advantages(f32(0, 1, 5), groups, False), f32(-3, -1.5, 4.5))
    torch.testing.assert_close(
        leave_one_out_advantages(f32(0, 1, 5), groups, True),
        f32(-3 / 2.828427, -1.5 / 3.535534, 4.5 / 0.707107), atol=1e-5, rtol=0,
    )  # fmt: skip


def test_case_2_leave_one_out_of_a_single_success() -> None:
    # 7 x 0.35 and 1.0. For the 1.0 the others are equal: no spread, so 0, not 0.65 / 1.5e-4.
    # For a 0.35: others 6 x 0.35 and 1.0, mean (2.1 + 1)/7 = 0.442857, advantage -0.092857; squares
    # 6 * 0.092857**2 + 0.557143**2 = 0.051735 + 0.310408 = 0.362143, /6 = 0.060357, root 0.245677; ratio -0.377965.
    groups = one_group(8)
    rewards = f32(*[0.35] * 7, 1.0)
    torch.testing.assert_close(
        leave_one_out_advantages(rewards, groups, True), f32(*[-0.377965] * 7, 0.0), atol=1e-6, rtol=0
    )
    assert leave_one_out_advantages(rewards, groups, True)[7] == 0
    # Undivided, the success keeps its advantage: 1 - 0.35.
    assert leave_one_out_advantages(rewards, groups, False)[7] == pytest.approx(0.65, abs=1e-6)
    # GRPO: mean 0.43125, centred -0.08125 and 0.56875; squares 7 * 0.0066016 + 0.3234766 = 0.3696875, /7 = 0.0528125,
    # root 0.229810; -0.353553 and 2.474874.
    torch.testing.assert_close(
        group_advantages(rewards, groups, True), f32(*[-0.353553] * 7, 2.474874), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("advantages", BOTH)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_case_2_rounding_residue_is_no_spread(advantages: Advantages, normalize: bool, scale: float) -> None:
    # One number computed in several ways in float32: 0.35 as such, as 0.1 + 0.25, as 0.7 / 2, and as a running sum.
    by_sum = np.float32(0)
    for _ in range(7):
        by_sum += np.float32(0.05)
    ways = [np.float32(0.35), np.float32(0.1) + np.float32(0.25), np.float32(0.7) / np.float32(2), by_sum]
    assert len({float(way) for way in ways}) > 1, "the test needs a residue"
    rewards = torch.tensor(np.array(ways * 2, np.float32) * np.float32(scale))
    groups = one_group(8)
    assert (advantages(rewards, groups, normalize) == 0).all()


def test_a_small_but_real_spread_counts() -> None:
    groups = one_group(2)
    seen = group_advantages(f32(1.0, 1.0001), groups, True)
    torch.testing.assert_close(seen, f32(-math.sqrt(0.5), math.sqrt(0.5)), atol=1e-3, rtol=0)


@pytest.mark.parametrize("advantages", BOTH)
@pytest.mark.parametrize("normalize", [True, False])
def test_groups_without_anything_to_compare(advantages: Advantages, normalize: bool) -> None:
    rewards, groups = f32(0, 0, 0, 3, -2, -2), torch.tensor([0, 0, 0, 1, 2, 2])
    assert (advantages(rewards, groups, normalize) == 0).all()
    assert advantages(rewards[:0], groups[:0], normalize).shape == (0,)


@pytest.mark.parametrize("advantages", BOTH)
def test_a_reward_that_is_not_a_number_is_named(advantages: Advantages) -> None:
    groups = one_group(3)
    with pytest.raises(ValueError, match="the reward of sample 1 is nan"):
        advantages(f32(0, math.nan, 1), groups, True)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    rewards = draw(st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=24))
    count = len(rewards)
    groups = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    return f32(*rewards), torch.tensor(groups)


@given(batch=batches(), normalize=st.booleans(), which=st.sampled_from(BOTH), seed=st.integers(0, 99))
def test_permuting_samples_permutes_advantages(
    batch: tuple[Tensor, Tensor], normalize: bool, which: Advantages, seed: int
) -> None:
    rewards, groups = batch
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    seen = which(rewards[order], groups[order], normalize)
    torch.testing.assert_close(seen, which(rewards, groups, normalize)[order], atol=1e-6, rtol=1e-6)


@given(batch=batches(), normalize=st.booleans(), which=st.sampled_from(BOTH), shift=st.integers(-64, 64))
def test_a_shift_of_a_groups_rewards_changes_nothing(
    batch: tuple[Tensor, Tensor], normalize: bool, which: Advantages, shift: int
) -> None:
    # Rewards in 64ths, so that the shift itself is exact in float32 and every spread stands far above residue.
    rewards, groups = (batch[0] * 64).round() / 64, batch[1]
    moved = torch.where(groups == groups[0], rewards + shift, rewards)
    torch.testing.assert_close(which(moved, groups, normalize), which(rewards, groups, normalize), atol=1e-5, rtol=1e-5)


@given(batch=batches(), normalize=st.booleans())
def test_grpo_advantages_of_a_group_sum_to_zero(batch: tuple[Tensor, Tensor], normalize: bool) -> None:
    rewards, groups = batch
    seen = group_advantages(rewards, groups, normalize)
    assert torch.isfinite(seen).all()
    for group in groups.unique():
        members = groups == group
        assert float(seen[members].double().sum()) == pytest.approx(0, abs=1e-4)
        if normalize and seen[members].any():
            assert float(seen[members].double().std()) == pytest.approx(1, abs=1e-5)
