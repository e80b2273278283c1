"""From per-token values to one number, the same for any split of the batch into microbatches and ranks.

Each function gives the weight of a sample's tokens in the loss; the loss is the sum of weight * value over all trained
tokens of all ranks. `trained` [N] are the numbers of the samples' tokens that are trained. A batch with nothing to
train on has weights 0, so its loss is 0 and not 0 / 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vime.algorithms.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def sample_token_weights(aggregation: Aggregation, trained: Tensor, longest: int) -> Tensor:
    """Weight float32 [N] of each trained token of a sample, over the whole batch.

    token_mean: 1 / all trained tokens. DAPO's token-level loss, arXiv 2503.14476, section 3.3.
    sequence_mean: 1 / (responses * the response's own trained tokens). GRPO, arXiv 2402.03300, equation 3. Responses
        without a trained token have no mean and are not counted.
    constant: 1 / (responses * longest). Dr. GRPO, arXiv 2503.20783, appendix A: no response's weight depends on its
        length. `longest` is the most tokens that a response may have.
    """
    tokens = trained.double()
    match aggregation:
        case "token_mean":
            result = (tokens > 0) / tokens.sum().clamp(min=1)
        case "sequence_mean":
            result = (tokens > 0) / ((tokens > 0).sum().clamp(min=1) * tokens.clamp(min=1))
        case "constant":
            result = torch.full_like(tokens, 1 / (max(len(tokens), 1) * longest))
    return result.float()


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of values * weights over [T], a scalar; what stands where the weight is 0 does not matter, NaN included."""
    return (torch.where(weights > 0, values, torch.zeros((), dtype=values.dtype, device=values.device)) * weights).sum()


def sample_sums(values: Tensor, samples: Tensor, count: int) -> Tensor:
    """Sums float32 [count] over the tokens of each sample, in float64; samples: int64 [T], 0 to count - 1."""
    sums = torch.zeros(count, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, samples, values.double()).float()


def response_sums(values: Tensor, samples: Tensor) -> Tensor:
    """Float32 [T]: the sum of the values over the token's response, in float64; its tokens stand together."""
    # Responses in their order here, at most T: no number of them has to come from the device.
    starts = torch.zeros_like(samples)
    starts[1:] = samples[1:] != samples[:-1]
    rows = starts.cumsum(0)
    return sample_sums(values, rows, len(values))[rows]
