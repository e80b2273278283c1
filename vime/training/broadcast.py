"""Bytes from trainer rank 0 to all ranks."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist


def broadcast_bytes(data: bytes) -> bytes:
    """`data` of rank 0, on every rank; what other ranks pass is not read."""
    device = torch.device(torch.cuda.current_device())
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    if dist.get_rank() == 0:
        payload = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).to(device)
    else:
        payload = torch.empty(int(size), dtype=torch.uint8, device=device)
    if payload.numel():
        dist.broadcast(payload, src=0)
    return payload.cpu().numpy().tobytes()
