"""Weights that correct for an engine that samples with other probabilities than the trainer computes.

The engine's kernels, number formats and batches differ from the trainer's, so that a token was drawn from q (the
engine's) while the gradient assumes p (the trainer's, of the same weights). The weight p / q removes the bias.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vime.algorithms.losses import LARGEST_LOG_RATIO
from vime.algorithms.masking import kept

Correction = Literal["truncated", "token_mask", "sequence_mask"]


def log_ratios(trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log p - log q [T] of each token, 0 outside the mask, without gradient. Raises NonFiniteLogprob where it holds."""
    keep = mask.bool()
    return kept(trainer_logprobs.detach(), keep, "logprobs") - kept(rollout_logprobs, keep, "rollout_logprobs")


def importance_weights(
    log_ratio: Tensor, sample_log_ratio: Tensor, correction: Correction, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Weight [T] of each token's loss, and bool [T] where its ratio is outside of low to high.

    truncated: the token's ratio, brought to the nearer bound. Source: "Your Efficient RL Framework Secretly Brings You
        Off-Policy RL Training", fengyao.notion.site/off-policy-rl (TIS).
    token_mask: the token's ratio, 0 outside. Source: "Every Step Evolves", arXiv 2510.18855 (IcePop).
    sequence_mask: the response's ratio (the product over its tokens), 0 outside. Source: "When Speed Kills Stability",
        yingru.notion.site (masked importance sampling of sequences).

    log_ratio: [T] from `log_ratios`. sample_log_ratio: [T], its sum over the token's response.
    """
    exponent = sample_log_ratio if correction == "sequence_mask" else log_ratio
    ratio = exponent.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    outside = (ratio < low) | (ratio > high)
    if correction == "truncated":
        return ratio.clamp(low, high), outside
    return torch.where(outside, torch.zeros_like(ratio), ratio), outside
