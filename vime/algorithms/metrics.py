"""A metric of a step: values of tokens, and how they become one number whatever the microbatches and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """Values [T] of the trained tokens of a microbatch, without gradient or with one that is not used.

    mean: over the tokens of each minibatch, then over the minibatches. sum, max, min: over all tokens of the step.
    A mean, maximum or minimum over no token is left out of the step's metrics.
    """

    values: Tensor
    reduction: Reduction = "mean"
    where: Tensor | None = None
    """Bool [T]: the tokens that count. None: all."""
    weights: Tensor | None = None
    """mean: float32 [T], weights of the tokens that add up over a minibatch, in place of equal ones."""
