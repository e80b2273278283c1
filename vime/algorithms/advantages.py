"""Advantages of whole responses from their rewards, relative to the other responses to the prompt.

The functions take rewards [N], the group of each sample (int64 [N], any numbers), and weights [N]: a sample of weight
0 only fills up a batch; it does not count in its group and gets advantage 0. They compute in float64 and return float32
[N] without gradient. They raise ValueError when the reward of a sample that counts is not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

RESIDUE = 2.0**-20
"""Rewards that differ by no more than this share of the largest of them count as equal. They travel in float32, where
one number computed in two ways differs by a few units of 2**-23; what is left of such a difference must not be divided
by itself and become an advantage."""


def group_advantages(rewards: Tensor, groups: Tensor, weights: Tensor, normalize_std: bool) -> Tensor:
    """GRPO: (reward - mean of the group) / standard deviation of the group, the division only if `normalize_std`.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; without the division, Dr. GRPO, arXiv 2503.20783. The
    deviation is the unbiased one (n - 1) and nothing is added to it: a group without spread, which the usual small
    constant guards against, gets exactly 0, as does a group of one.
    """
    result = torch.zeros(len(rewards), dtype=torch.float32, device=rewards.device)
    for members in _members(rewards, groups, weights):
        values = rewards[members].double()
        if spread_is_residue(values):
            continue
        centred = values - values.mean()
        result[members] = (centred / values.std() if normalize_std else centred).float()
    return result


def leave_one_out_advantages(rewards: Tensor, groups: Tensor, weights: Tensor, normalize_std: bool) -> Tensor:
    """RLOO: reward - mean of the group's others; divided by the others' standard deviation if `normalize_std`.

    Source: Back to Basics, arXiv 2402.14740. When the others have no spread, the divided advantage is 0. A group of one
    has no others: 0.
    """
    result = torch.zeros(len(rewards), dtype=torch.float32, device=rewards.device)
    for members in _members(rewards, groups, weights):
        values = rewards[members].double()
        count = len(values)
        if spread_is_residue(values):
            continue
        # Row i holds the others of sample i. Not n * mean - own: that difference leaves rounding residue of its own.
        other = ~torch.eye(count, dtype=torch.bool, device=values.device)
        others = values.expand(count, count)[other].view(count, count - 1)
        advantage = values - others.mean(1)
        if normalize_std:
            flat = spread_is_residue(others)
            deviation = others.std(1) if count > 2 else torch.zeros_like(advantage)
            advantage = torch.where(flat, torch.zeros_like(advantage), advantage / torch.where(flat, 1.0, deviation))
        result[members] = advantage.float()
    return result


def centred_rewards(rewards: Tensor, groups: Tensor, weights: Tensor) -> Tensor:
    """REINFORCE++-baseline before its normalisation over the batch: reward - mean of the group.

    Source: REINFORCE++, arXiv 2501.03262, section on the group-mean baseline. A group of one gets 0.
    """
    return group_advantages(rewards, groups, weights, normalize_std=False)


def counted_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """The rewards as they are, 0 for a sample of weight 0: what REINFORCE++ and PPO start from."""
    _members(rewards, torch.zeros_like(weights), weights)
    return torch.where(weights > 0, rewards, torch.zeros_like(rewards)).float()


def spread_is_residue(rewards: Tensor) -> Tensor:
    """Whether rewards [..., n] are equal along the last dimension but for rounding in float32; bool [...]."""
    return rewards.amax(-1) - rewards.amin(-1) <= RESIDUE * rewards.abs().amax(-1)


def _members(rewards: Tensor, groups: Tensor, weights: Tensor) -> list[Tensor]:
    """Positions of each group's samples that count."""
    counted = (weights > 0).nonzero().flatten()
    strange = ~torch.isfinite(rewards[counted])
    if bool(strange.any()):
        index = int(counted[strange][0])
        raise ValueError(f"the reward of sample {index} is {float(rewards[index])}")
    if not len(counted):
        return []
    order = torch.argsort(groups[counted], stable=True)
    sizes = torch.unique_consecutive(groups[counted][order], return_counts=True)[1]
    return list(torch.split(counted[order], sizes.tolist()))
