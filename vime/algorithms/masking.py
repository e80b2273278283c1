"""Keeping masked tokens out of the arithmetic, so that nothing they hold reaches a loss or a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime.algorithms.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


class NonFiniteLogprob(Exception):
    """A token that is trained on has a NaN or infinite value. `index` is its position in the flat tensor `name`."""

    def __init__(self, name: str, index: int, value: float) -> None:
        super().__init__(f"{name} is {value} at token {index}, which is trained on")
        self.name = name
        self.index = index
        self.value = value


def kept(values: Tensor, keep: Tensor, name: str) -> Tensor:
    """`values` [T] where `keep` (bool [T]) holds; elsewhere 0 with exactly zero gradient, whatever stands there.

    The choice is made before any arithmetic: multiplying by a mask afterwards leaves NaN * 0 = NaN, in the value and in
    the gradient. Raises NonFiniteLogprob for the first kept value that is not finite.
    """
    chosen = torch.where(keep, values, torch.zeros((), dtype=values.dtype, device=values.device))
    finite = torch.isfinite(chosen.detach())
    if not bool(finite.all()):
        index = int((~finite).nonzero()[0])
        raise NonFiniteLogprob(name, index, float(chosen[index]))
    return chosen
