"""Advantages of single tokens against arithmetic done by hand and against a plain loop."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vime.algorithms.advantages import centred_rewards
from vime.algorithms.returns import combine, discounted_sums, gae, moments, standardized, token_rewards


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_gae_by_hand() -> None:
    # One response of three tokens, reward 1 at its end, values 0.5, 0.6, 0.7, gamma 0.9, lambda 0.5.
    # delta: 0.9 * 0.6 - 0.5 = 0.04; 0.9 * 0.7 - 0.6 = 0.03; 1 - 0.7 = 0.3.
    # A: 0.3; 0.03 + 0.45 * 0.3 = 0.165; 0.04 + 0.45 * 0.165 = 0.11425. Returns: A + V.
    # A second response of one token, reward -1, value 0.2: delta -1.2.
    samples = torch.tensor([0, 0, 0, 1])
    rewards = token_rewards(f32(1, 1, 1, -1), samples)
    assert rewards.tolist() == [0, 0, 1, -1]
    advantages, returns = gae(rewards, f32(0.5, 0.6, 0.7, 0.2), samples, 0.9, 0.5)
    torch.testing.assert_close(advantages, f32(0.11425, 0.165, 0.3, -1.2), atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, f32(0.61425, 0.765, 1.0, -1.0), atol=1e-6, rtol=0)


def test_gae_with_lambda_1_is_reward_minus_value() -> None:
    samples = torch.tensor([5, 5, 2])
    advantages, returns = gae(token_rewards(f32(1, 1, 3), samples), f32(0.25, 0.75, 1.0), samples, 1.0, 1.0)
    torch.testing.assert_close(returns, f32(1, 1, 3))
    torch.testing.assert_close(advantages, f32(0.75, 0.25, 2.0))


def test_reinforce_plus_plus_by_hand() -> None:
    # Reward 2 at the end of three tokens, a penalty of 0.1 each: 2 - 0.1 * (tokens from there on), discounted by 1.
    samples = torch.tensor([0, 0, 0, 1])
    own = token_rewards(f32(2, 2, 2, 1), samples, penalties=f32(0.1, 0.1, 0.1, 0.5))
    torch.testing.assert_close(discounted_sums(own, samples, 1.0), f32(1.7, 1.8, 1.9, 0.5))
    # Discounted by 0.5: 1.9; -0.1 + 0.95 = 0.85; -0.1 + 0.425 = 0.325.
    torch.testing.assert_close(discounted_sums(own, samples, 0.5), f32(0.325, 0.85, 1.9, 0.5))
    # Over the batch: mean of 1, 2, 3 is 2, deviation 1.
    values = f32(1, 2, 3)
    torch.testing.assert_close(standardized(values, moments(values)), f32(-1, 0, 1))


def test_what_the_baseline_starts_from() -> None:
    assert centred_rewards(f32(1, 3, 7), torch.tensor([0, 0, 1])).tolist() == [-1, 1, 0]


def test_case_2_a_spread_of_rounding_residue_is_none() -> None:
    values = f32(*[0.35] * 7, float(np.float32(0.1) + np.float32(0.25)), float(np.float32(0.7) / np.float32(2)))
    values[0] = torch.nextafter(values[0], f32(1.0)[0])
    assert len(values.unique()) > 1, "the test needs a residue"
    assert (standardized(values, moments(values)) == 0).all()
    assert (standardized(f32(3.0), moments(f32(3.0))) == 0).all()
    assert (standardized(f32(), torch.zeros(5, dtype=torch.float64)) == 0).all()


Ragged = tuple[list[list[float]], list[list[float]]]


@st.composite
def ragged(draw: st.DrawFn) -> Ragged:
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    number = st.floats(-5, 5, width=16)
    return [draw(st.lists(number, min_size=n, max_size=n)) for n in lengths], [
        draw(st.lists(number, min_size=n, max_size=n)) for n in lengths
    ]


@given(batch=ragged(), gamma=st.sampled_from([1.0, 0.97, 0.5]), lambda_=st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_is_the_plain_loop(batch: Ragged, gamma: float, lambda_: float) -> None:
    rewards, values = batch
    flat = [value for row in values for value in row]
    samples = torch.tensor([i for i, row in enumerate(rewards) for _ in row])
    seen, returns = gae(f32(*(r for row in rewards for r in row)), f32(*flat), samples, gamma, lambda_)
    expected = []
    for row, value in zip(rewards, values, strict=True):
        advantage, later, back = 0.0, 0.0, []
        for t in reversed(range(len(row))):
            advantage = row[t] + gamma * later - value[t] + gamma * lambda_ * advantage
            later = value[t]
            back.append(advantage)
        expected += back[::-1]
    torch.testing.assert_close(seen, f32(*expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(returns - seen, f32(*flat), atol=1e-4, rtol=1e-4)


@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_moments_do_not_depend_on_the_parts(values: list[float], cuts: list[int]) -> None:
    whole = f32(*values)
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [moments(whole[a:b]) for a, b in itertools.pairwise(edges)]
    combined = combine(torch.stack(parts))
    torch.testing.assert_close(combined, moments(whole))
    assert float(combined[1]) == pytest.approx(np.mean(np.array(values)), abs=1e-9)
    assert float((combined[2] / (len(values) - 1)).sqrt()) == pytest.approx(np.std(values, ddof=1), abs=1e-6)
