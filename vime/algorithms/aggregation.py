"""From per-token values to one number, the same for any split of the batch into microbatches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def token_weights(mask_total: float, mask: Tensor) -> Tensor:
    """Weight [T] float32 of each token in the mean over all trained tokens of the global batch: mask / mask_total.

    Source: DAPO's token-level loss, arXiv 2503.14476, section 3.3. `mask_total` is the sum of the mask over every
    sample of the batch on all ranks (of `masked_in * weight` in the manifest), and `mask` is already multiplied by the
    weight of its sample. A batch with nothing to train on has weights 0, so its loss is 0 and not 0 / 0.
    """
    return mask.float() / mask_total if mask_total > 0 else torch.zeros_like(mask, dtype=torch.float32)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of values * weights over [T], a scalar; what stands where the weight is 0 does not matter, NaN included."""
    return (torch.where(weights > 0, values, torch.zeros((), dtype=values.dtype, device=values.device)) * weights).sum()
