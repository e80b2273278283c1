"""Per-token losses. Sum them with `aggregation.weighted_sum`; tokens outside the mask have loss 0 and gradient 0."""

from __future__ import annotations

import torch
from torch import Tensor

from vime.algorithms.masking import kept

LARGEST_LOG_RATIO = 20.0
"""Log-probability ratios are clamped to +-20: exp() overflows near 88, and an overflow in the branch not taken makes
the gradient NaN (0 * inf). A token beyond has no gradient; at e**20 the clip, or the run, has gone long before."""


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate, -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = p / p_old.

    Sources: PPO, arXiv 1707.06347; separate bounds ("clip-higher"), DAPO, arXiv 2503.14476. All arguments are [T], mask
    bool or 0/1; only `logprobs` gets a gradient. Returns the loss [T] and, bool [T], where the clip took the gradient
    away. Raises NonFiniteLogprob for a NaN or infinity where the mask holds.
    """
    keep = mask.bool()
    new = kept(logprobs, keep, "logprobs")
    old = kept(old_logprobs.detach(), keep, "old_logprobs")
    advantage = kept(advantages.detach(), keep, "advantages")
    ratio = (new - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    free = ratio * advantage
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    return -torch.minimum(free, bounded), (bounded < free).detach()


def likelihood_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Supervised fine-tuning: the negative log-likelihood [T] of each token where the mask holds, 0 elsewhere.

    Raises NonFiniteLogprob for a NaN or infinity where the mask holds.
    """
    return -kept(logprobs, mask.bool(), "logprobs")
