"""Sums and moments over all trainer ranks, each token counted once."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vime.algorithms.returns import combine
from vime.training import parallel


def counts_here() -> bool:
    """Whether this rank speaks for its packs: the last stage knows them, its tensor and context ranks all alike."""
    return parallel.is_last_stage() and parallel.tensor_rank() == 0 and parallel.context_rank() == 0


def sum_over_ranks(values: Tensor) -> Tensor:
    """Float64 sum over the ranks that `counts_here`, on every rank. Others may pass anything of the same shape."""
    device = torch.device(torch.cuda.current_device())
    total = (
        values.double().to(device) if counts_here() else torch.zeros(values.shape, dtype=torch.float64, device=device)
    )
    dist.all_reduce(total)
    return total


def moments_over_ranks(mine: Tensor | None) -> Tensor:
    """The moments of all ranks' values, on every rank. `mine`: float64 [5], read where the rank `counts_here`."""
    device = torch.device(torch.cuda.current_device())
    part = torch.zeros(5, dtype=torch.float64, device=device)
    if counts_here() and mine is not None:
        part += mine
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return combine(torch.stack(parts))
