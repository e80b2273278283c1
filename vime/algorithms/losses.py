"""Per-token losses. Sum them with `aggregation.weighted_sum`; tokens outside the mask have loss 0 and gradient 0.

All arguments are [T], mask bool or 0/1; only `logprobs` (or `values`) gets a gradient. Losses with a bound also return,
bool [T], where it took the gradient away. All raise NonFiniteLogprob for a NaN or infinity where the mask holds.

To add a policy loss, write its function and its row of LOSSES, and a test. It is called with those arguments that it
names: the tensors [T] logprobs, old_logprobs, advantages, mask, rollout_logprobs and samples (int64, which response a
token is of; those of one response stand together), and the settings clip_low, clip_high and clip_dual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime.algorithms.aggregation import response_sums
from vime.algorithms.lazy_torch import torch
from vime.algorithms.masking import kept
from vime.algorithms.table import Row

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Log-probability ratios are clamped to +-20: exp() overflows near 88, and an overflow in the branch not taken makes
the gradient NaN (0 * inf). A token beyond has no gradient; at e**20 the clip, or the run, has gone long before."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate, -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = p / p_old.

    With clip_dual, and only where A < 0, at most -clip_dual * A: a ratio that ran away does not dominate the batch.

    Sources: PPO, arXiv 1707.06347; separate bounds ("clip-higher"), DAPO, arXiv 2503.14476; dual clip, arXiv
    1912.09729.
    """
    log_ratio, advantage = _log_ratio(logprobs, old_logprobs, advantages, mask)
    return _clipped(log_ratio.exp(), advantage, clip_low, clip_high, clip_dual)


def sequence_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    samples: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """GSPO: PPO's clipped surrogate with the ratio of the whole response, exp(mean over its tokens of log p / p_old).

    samples: int64 [T], the response of each token; the tokens of one stand together. As in the paper's token form,
    the ratio is sg[s] * p / sg[p]: equal in value to s, and where the tokens of a response share one
    advantage and one weight, equal in gradient.

    Source: GSPO, arXiv 2507.18071.
    """
    keep = mask.bool()
    log_ratio, advantage = _log_ratio(logprobs, old_logprobs, advantages, mask)
    change = kept(logprobs.detach(), keep, "logprobs") - kept(old_logprobs.detach(), keep, "old_logprobs")
    mean = response_sums(change, samples) / response_sums(keep.float(), samples).clamp(min=1)
    mean = mean.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return _clipped((mean + log_ratio - log_ratio.detach()).exp(), advantage, clip_low, clip_high, None)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """CISPO: -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] * A * log p: the weight is clipped, no gradient is lost.

    The bool says where the weight was clipped. Source: MiniMax-M1, arXiv 2506.13585.
    """
    log_ratio, advantage = _log_ratio(logprobs, old_logprobs, advantages, mask)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantage * kept(logprobs, mask.bool(), "logprobs"), weight != ratio


def likelihood_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Supervised fine-tuning: the negative log-likelihood [T] of each token where the mask holds, 0 elsewhere."""
    return -kept(logprobs, mask.bool(), "logprobs")


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, value_clip: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped value loss, max((V - R)**2, (V_old + clip(V - V_old, +-value_clip) - R)**2) / 2.

    Source: the implementation of PPO, arXiv 1707.06347, in OpenAI baselines; "The 37 Implementation Details of PPO",
    iclr-blog-track.github.io, detail 9.
    """
    keep = mask.bool()
    new, target = kept(values, keep, "values"), kept(returns.detach(), keep, "returns")
    old = kept(old_values.detach(), keep, "old_values")
    free = (new - target).square()
    bounded = (old + (new - old).clamp(-value_clip, value_clip) - target).square()
    # Inside the bounds the two differ by rounding.
    clipped = ((new - old).abs() > value_clip) & (bounded > free)
    return torch.maximum(free, bounded) / 2, clipped.detach()


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Bounded log p / p_old, and the advantages; both 0 outside the mask."""
    keep = mask.bool()
    new = kept(logprobs, keep, "logprobs")
    old = kept(old_logprobs.detach(), keep, "old_logprobs")
    advantage = kept(advantages.detach(), keep, "advantages")
    return (new - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO), advantage


def _clipped(
    ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, clip_dual: float | None
) -> tuple[Tensor, Tensor]:
    free = ratio * advantage
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    smaller = torch.minimum(free, bounded)
    clipped = bounded < free
    if clip_dual is not None:
        floor = torch.where(advantage < 0, clip_dual * advantage, float("-inf"))
        clipped |= floor > smaller
        smaller = torch.maximum(smaller, floor)
    return -smaller, clipped.detach()


LOSSES = {
    "clip": Row(
        policy_loss,
        "clipped probability ratio of a token (`clip_low`, `clip_high`, `clip_dual`)",
        "PPO, DAPO, dual clip",
    ),
    "gspo": Row(sequence_policy_loss, "clipped ratio of a whole response", "GSPO"),
    "cispo": Row(cispo_loss, "clipped weight, no gradient lost", "MiniMax-M1"),
}
"""Policy losses by the name that `algorithm.loss` gives them."""
