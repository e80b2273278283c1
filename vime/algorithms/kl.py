"""Per-token estimates of the KL divergence KL(p || p_ref) from one sampled token each."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vime.algorithms.losses import LARGEST_LOG_RATIO
from vime.algorithms.masking import kept


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    estimator: Literal["k1", "k2", "k3"],
    mask: Tensor,
    clamp: float | None = None,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """Estimate [T] of KL(p || p_ref), with d = log p_ref - log p of tokens sampled from p; 0 outside the mask.

    k1 = -d: unbiased, large variance, may be negative. As a loss its expected gradient is zero: it is for rewards.
    k2 = d**2 / 2: biased, never negative; its gradient is an unbiased estimate of the divergence's.
    k3 = exp(d) - 1 - d: unbiased and never negative; d is clamped to +-20.
    old_logprobs: of the policy that sampled the tokens. With them the estimate is multiplied by the ratio p / p_old,
    and the expected gradient of k1 and k3 is that of the divergence. Source: DeepSeek-V3.2, arXiv 2512.02556.
    clamp: brings each estimate, before that ratio, to within +-clamp, without any gradient beyond, so that one token
    cannot rule the batch.

    Source: J. Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html; k3 in the loss as in arXiv
    2402.03300. Only `logprobs` gets a gradient. Raises NonFiniteLogprob for a NaN or infinity where the mask holds.
    """
    keep = mask.bool()
    difference = kept(reference_logprobs.detach(), keep, "reference_logprobs") - kept(logprobs, keep, "logprobs")
    match estimator:
        case "k1":
            estimate = -difference
        case "k2":
            estimate = difference.square() / 2
        case "k3":
            bounded = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
            # expm1: exp(d) - 1 loses every digit of a small d in float32, and k3 is of order d**2.
            estimate = bounded.expm1() - bounded
    beyond = torch.zeros_like(keep)
    if clamp is not None:
        beyond = estimate.detach().abs() > clamp
        estimate = estimate.clamp(-clamp, clamp)
    if old_logprobs is None:
        return estimate
    log_ratio = kept(logprobs, keep, "logprobs") - kept(old_logprobs.detach(), keep, "old_logprobs")
    ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    return estimate * torch.where(beyond, ratio.detach(), ratio)
