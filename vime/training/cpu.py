"""The CPU as a device for Megatron-core.

Megatron-core asks torch.cuda for devices, streams, events and random states wherever it computes. `enable` makes those
names mean the CPU, once, before a model is built; the rest of vime is written for GPUs and does not know. Each patch
says which part of Megatron-core 0.16 needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor",
    "zeros",
    "empty",
    "ones",
    "full",
    "arange",
    "rand",
    "randn",
    "zeros_like",
    "empty_like",
    "ones_like",
)


class _NoStream:
    """Stands for a CUDA stream or event: CPU work is done when the call returns, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return wrapped


def enable() -> None:
    """Make Megatron-core run on this process's CPU. Idempotent."""
    if getattr(torch.cuda, "_vime_cpu", False):
        return
    torch.cuda._vime_cpu = True  # type: ignore[attr-defined]
    cuda: Any = torch.cuda
    # Device and stream handling, used all over Megatron-core.
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda device: None
    cuda.synchronize = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _NoStream()
    cuda.stream = lambda stream: nullcontext()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _patch_random()
    _patch_optimizers()


def _patch_random() -> None:
    """tensor_parallel.random keeps one generator state a purpose; here they are states of the CPU generator."""
    from megatron.core.tensor_parallel import random as parallel_random

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    cuda: Any = torch.cuda
    cuda.get_rng_state = cuda.random.get_rng_state = get_state
    cuda.manual_seed = torch.default_generator.manual_seed
    parallel_random._get_cuda_rng_state = get_state
    parallel_random._set_cuda_rng_state = set_state


def _patch_optimizers() -> None:
    """The optimizers sort parameters by `param.type()`, of which they know only CUDA's names."""
    type_of = torch.Tensor.type

    @functools.wraps(type_of)
    def cuda_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return str(type_of(self)).replace("torch.", "torch.cuda.", 1)
        return type_of(self, dtype, *args, **kwargs)

    # Only Megatron's optimizers ask without an argument; a conversion (with a dtype) stays what it is.
    torch.Tensor.type = cuda_name  # type: ignore[method-assign, assignment]
