"""Bytes and JSON from one trainer rank to the others. Nothing is pickled."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


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
