"""Sums, extremes and moments over all trainer ranks, each token counted once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
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


def max_over_ranks(values: Tensor) -> Tensor:
    """Float64 maximum over the ranks that `counts_here`, on every rank. Others may pass anything of the same shape."""
    device = torch.device(torch.cuda.current_device())
    largest = (
        values.double().to(device)
        if counts_here()
        else torch.full(values.shape, -torch.inf, dtype=torch.float64, device=device)
    )
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def moments_over_ranks(mine: Tensor | None) -> Tensor:
    """The moments of all ranks' values, on every rank. `mine`: float64 [5], read where the rank `counts_here`."""
    device = torch.device(torch.cuda.current_device())
    part = torch.zeros(5, dtype=torch.float64, device=device)
    if counts_here() and mine is not None:
        part += mine
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return combine(torch.stack(parts))


def first_known(value: Any) -> Any:
    """The JSON value of the lowest rank that has one, on every rank; None where a rank has none, and when all have."""
    device = torch.device(torch.cuda.current_device())
    nobody = dist.get_world_size()
    rank = torch.tensor(nobody if value is None else dist.get_rank(), device=device)
    dist.all_reduce(rank, op=dist.ReduceOp.MIN)
    return broadcast_json(value, src=int(rank)) if int(rank) < nobody else None


def broadcast_bytes(data: bytes, src: int = 0, group: dist.ProcessGroup | None = None) -> bytes:
    """`data` of the global rank `src`, on every rank of `group` (default: all); what other ranks pass is not read."""
    device = torch.device(torch.cuda.current_device())
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=src, group=group)
    if dist.get_rank() == src:
        payload = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).to(device)
    else:
        payload = torch.empty(int(size), dtype=torch.uint8, device=device)
    if payload.numel():
        dist.broadcast(payload, src=src, group=group)
    return payload.cpu().numpy().tobytes()


def broadcast_json(value: Any, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """A JSON value of the global rank `src`, on every rank of `group`; what other ranks pass is not read."""
    return json.loads(broadcast_bytes(json.dumps(value).encode() if dist.get_rank() == src else b"", src, group))
