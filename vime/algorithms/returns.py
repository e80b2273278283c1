"""Advantages of single tokens: discounted rewards to come, generalised advantage estimation, batch normalisation.

T tokens are those that the policy chose, of any number of samples one after the other: they are the time steps, and
what a tool or a template wrote between them is the environment's answer. `samples` is int64 [T], the sample of each
token; the tokens of a sample stand together and in order. Nothing here has a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime.algorithms.lazy_torch import torch
from vime.algorithms.spread import spread_is_residue

if TYPE_CHECKING:
    from torch import Tensor


def last_tokens(samples: Tensor) -> Tensor:
    """Bool [T]: the last token of each sample."""
    last = torch.ones_like(samples, dtype=torch.bool)
    last[:-1] = samples[1:] != samples[:-1]
    return last


def token_rewards(rewards: Tensor, samples: Tensor, penalties: Tensor | None = None) -> Tensor:
    """Reward float32 [T] of each token: that of its sample at the last one, less the penalty (a KL term) of each.

    rewards: [T], of the token's sample. Source: InstructGPT, arXiv 2203.02155, as PPO and REINFORCE++ use it.
    """
    result = torch.where(last_tokens(samples), rewards, torch.zeros_like(rewards))
    return result if penalties is None else result - penalties


def discounted_sums(values: Tensor, samples: Tensor, factor: float) -> Tensor:
    """Float32 [T]: sum over the later tokens u >= t of the sample of factor**(u - t) * values[u]."""
    if not len(values):
        return values.float()
    lengths = torch.unique_consecutive(samples, return_counts=True)[1]
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    columns = torch.arange(len(values), device=values.device) - starts[rows]
    padded = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.float64, device=values.device)
    padded[rows, columns] = values.double()
    if factor == 1.0:
        return padded.flip(1).cumsum(1).flip(1)[rows, columns].float()
    for column in range(padded.shape[1] - 2, -1, -1):
        padded[:, column] += factor * padded[:, column + 1]
    return padded[rows, columns].float()


def rewards_to_come(rewards: Tensor, samples: Tensor, gamma: float) -> Tensor:
    """REINFORCE++ before its normalisation over the batch: the discounted rewards of a token and those after it.

    Source: REINFORCE++, arXiv 2501.03262.
    """
    return discounted_sums(rewards, samples, gamma)


def gae(rewards: Tensor, values: Tensor, samples: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: advantages and returns (the critic's targets), float32 [T].

    delta_t = r_t + gamma * V_{t+1} - V_t, with V = 0 after the last token; A_t is the sum over k of
    (gamma * lambda)**k * delta_{t+k}; return = A + V. values: [T], of the state before each token.

    Source: arXiv 1506.02438, equations 11 and 16.
    """
    following = torch.zeros_like(values)
    following[:-1] = values[1:]
    following = torch.where(last_tokens(samples), torch.zeros_like(values), following)
    advantages = discounted_sums(rewards + gamma * following - values, samples, gamma * gae_lambda)
    return advantages, advantages + values


def moments(values: Tensor) -> Tensor:
    """Float64 [5] of values [T]: count, mean, sum of squared deviations, smallest, largest; of no value 0."""
    chosen = values.double()
    if not len(chosen):
        return torch.zeros(5, dtype=torch.float64, device=values.device)
    mean = chosen.mean()
    spread = (chosen - mean).square().sum()
    return torch.stack([torch.full_like(mean, len(chosen)), mean, spread, chosen.min(), chosen.max()])


def combine(parts: Tensor) -> Tensor:
    """The moments [5] of everything, from those of its parts [parts, 5]; parts of count 0 do not matter.

    Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
    """
    parts = parts[parts[:, 0] > 0]
    if not len(parts):
        return torch.zeros(5, dtype=torch.float64, device=parts.device)
    counts, means = parts[:, 0], parts[:, 1]
    count = counts.sum()
    mean = (counts * means).sum() / count
    spread = (parts[:, 2] + counts * (means - mean).square()).sum()
    return torch.stack([count, mean, spread, parts[:, 3].min(), parts[:, 4].max()])


def standardized(values: Tensor, all_moments: Tensor) -> Tensor:
    """(values - mean) / deviation (n - 1), float32 [T]; all 0 where the spread is none but rounding residue.

    Source: REINFORCE++, arXiv 2501.03262 (normalisation over the global batch); PPO's usual implementation does it too.
    """
    count, mean, spread, smallest, largest = all_moments.to(values.device)
    if count < 2 or spread_is_residue(smallest, largest):
        return torch.zeros_like(values, dtype=torch.float32)
    return ((values.double() - mean) / (spread / (count - 1)).sqrt()).float()
