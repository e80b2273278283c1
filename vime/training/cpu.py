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
FACTORIES = (
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

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        return lambda *args, **kwargs: self  # what records or queries one gets another of these


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
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _patch_random()
    _patch_optimizers()
    _patch_experts()
    _patch_uneven_collectives()


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


def _patch_experts() -> None:
    """The router and the token dispatcher."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # Megatron-core 0.16.1 tests this name for None, but defines it only beside Transformer Engine.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]

    def as_numpy_too(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    # The original only turns what was on a GPU into the arrays that the all-to-all takes its sizes from.
    token_dispatcher.maybe_move_tensor_to_cpu = as_numpy_too  # type: ignore[attr-defined]


def _patch_uneven_collectives() -> None:
    """Expert-tensor-parallel ranks hold different numbers of tokens; gloo gathers and scatters only equal parts."""
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    @functools.wraps(gather)
    def gather_uneven(tensor: torch.Tensor, group: Any, sizes: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        sizes = kwargs.pop("output_split_sizes", sizes)
        if sizes is None or group.size() == 1:
            return gather(tensor, group, None, *args, **kwargs)
        longest = max(sizes)
        padded = torch.cat([tensor, tensor.new_zeros(longest - tensor.shape[0], *tensor.shape[1:])])
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @functools.wraps(scatter)
    def scatter_uneven(tensor: torch.Tensor, group: Any, sizes: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        sizes = kwargs.pop("input_split_sizes", sizes)
        if sizes is None or group.size() == 1:
            return scatter(tensor, group, None, *args, **kwargs)
        total = tensor.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather_uneven
    mappings._reduce_scatter_along_first_dim = scatter_uneven
