"""Advantages from rewards. Those of whole responses stand here, relative to the other responses to the prompt.

The functions take rewards [N] and the group of each sample (int64 [N], any numbers). They compute in float64 and return
float32 [N] without gradient. They raise ValueError when a reward is not finite.

To add an advantage, write its function and its row of ADVANTAGES, and a test. It is called with those arguments that it
names. `of="responses"`: rewards, groups, response_tokens [N] and the setting normalize_std; it returns [N].
`of="tokens"`: of the T trained tokens of a microbatch, rewards [T] (the response's at its last token, less KL terms),
samples (int64 [T], the response of each) and the settings gamma and gae_lambda; it returns [T]. A `critic`'s has its
values [T] too, and returns advantages and the critic's targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vime.algorithms.lazy_torch import torch
from vime.algorithms.returns import gae, rewards_to_come
from vime.algorithms.spread import spread_is_residue
from vime.algorithms.table import Row

if TYPE_CHECKING:
    from torch import Tensor


def group_advantages(rewards: Tensor, groups: Tensor, normalize_std: bool) -> Tensor:
    """GRPO: (reward - mean of the group) / standard deviation of the group, the division only if `normalize_std`.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; without the division, Dr. GRPO, arXiv 2503.20783. The
    deviation is the unbiased one (n - 1) and nothing is added to it: a group without spread, which the usual small
    constant guards against, gets exactly 0, as does a group of one.
    """
    result = torch.zeros(len(rewards), dtype=torch.float32, device=rewards.device)
    for members in _members(rewards, groups):
        values = rewards[members].double()
        if spread_is_residue(values.min(), values.max()):
            continue
        centred = values - values.mean()
        result[members] = (centred / values.std() if normalize_std else centred).float()
    return result


def leave_one_out_advantages(rewards: Tensor, groups: Tensor, normalize_std: bool) -> Tensor:
    """RLOO: reward - mean of the group's others; divided by the others' standard deviation if `normalize_std`.

    Source: Back to Basics, arXiv 2402.14740. When the others have no spread, the divided advantage is 0. A group of one
    has no others: 0.
    """
    result = torch.zeros(len(rewards), dtype=torch.float32, device=rewards.device)
    for members in _members(rewards, groups):
        values = rewards[members].double()
        count = len(values)
        if spread_is_residue(values.min(), values.max()):
            continue
        # Row i holds the others of sample i. Not n * mean - own: that difference leaves rounding residue of its own.
        other = ~torch.eye(count, dtype=torch.bool, device=values.device)
        others = values.expand(count, count)[other].view(count, count - 1)
        advantage = values - others.mean(1)
        if normalize_std:
            flat = spread_is_residue(others.amin(1), others.amax(1))
            deviation = others.std(1) if count > 2 else torch.zeros_like(advantage)
            advantage = torch.where(flat, torch.zeros_like(advantage), advantage / torch.where(flat, 1.0, deviation))
        result[members] = advantage.float()
    return result


def centred_rewards(rewards: Tensor, groups: Tensor) -> Tensor:
    """REINFORCE++-baseline before its normalisation over the batch: reward - mean of the group.

    Source: REINFORCE++, arXiv 2501.03262, section on the group-mean baseline. A group of one gets 0.
    """
    return group_advantages(rewards, groups, normalize_std=False)


def _members(rewards: Tensor, groups: Tensor) -> list[Tensor]:
    """Positions of each group's samples."""
    strange = (~torch.isfinite(rewards)).nonzero().flatten()
    if len(strange):
        index = int(strange[0])
        raise ValueError(f"the reward of sample {index} is {float(rewards[index])}")
    if not len(rewards):
        return []
    order = torch.argsort(groups, stable=True)
    sizes = torch.unique_consecutive(groups[order], return_counts=True)[1]
    return list(torch.split(order, sizes.tolist()))


@dataclass(frozen=True)
class Advantage(Row):
    """How rewards become advantages."""

    of: Literal["responses", "tokens"] = "responses"
    """What has an advantage of its own; all tokens of a response have the response's."""
    compares_group: bool = False
    """Relative to the other responses to the prompt. Of tokens: the group's mean is taken from the rewards before."""
    normalize_std: bool = True
    """Whether it was published with a division by the rewards' spread, or of tokens by the spread of the batch's
    advantages."""
    critic: bool = False
    """Whether it takes a critic's values."""


ADVANTAGES = {
    "grpo": Advantage(
        group_advantages,
        "reward less the group's mean, divided by its deviation (`normalize_std=false`: not)",
        "DeepSeekMath; Dr. GRPO",
        compares_group=True,
    ),
    "rloo": Advantage(
        leave_one_out_advantages,
        "reward less the mean of the group's others",
        "Back to Basics",
        compares_group=True,
        normalize_std=False,
    ),
    "reinforce_plus_plus": Advantage(
        rewards_to_come,
        "discounted rewards to come of each token, normalised over the batch",
        "REINFORCE++",
        of="tokens",
    ),
    "reinforce_plus_plus_baseline": Advantage(
        rewards_to_come,
        "the same from rewards less the group's mean",
        "REINFORCE++",
        of="tokens",
        compares_group=True,
    ),
    "gae": Advantage(
        gae,
        "of `name=ppo`: generalised advantage estimation (`gamma`, `gae_lambda`) with the critic's values",
        "GAE, PPO",
        of="tokens",
        critic=True,
    ),
}
"""Advantages by the name that `algorithm.advantage` gives them."""
