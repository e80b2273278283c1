"""Weights over gloo, the engine's side: what vLLM's nccl weight-transfer backend does, for machines without NCCL.

Wire format. One gloo group of its own, no part of vLLM's: the trainer's sender is rank 0, the worker with index i (over
data and tensor parallel ranks) is rank `rank_offset + i`. An update is announced over HTTP with the names, dtypes and
shapes of its tensors; then each tensor travels as one broadcast from rank 0, in that order, in checkpoint layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup, TCPStore
from vllm.distributed.utils import init_gloo_process_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from vime.rollout.engine.cpu_reload import repack


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """How a worker joins the transfer group."""

    master_address: str
    """Address of the sender's rendezvous store."""
    master_port: int
    """Its port; the sender listens on it before it posts this."""
    rank_offset: int
    """Rank of this engine's first worker (the sender is rank 0, so at least 1)."""
    world_size: int
    """Sender plus the workers of all engines in the group."""
    timeout: float = 300.0
    """Seconds that joining, and each broadcast, may take."""


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of one update, in the order in which they are broadcast."""

    names: list[str] = field(default_factory=list)
    """Hugging Face parameter names."""
    dtype_names: list[str] = field(default_factory=list)
    """torch dtype of each, such as float32."""
    shapes: list[list[int]] = field(default_factory=list)
    """Full shape of each."""

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(
                f"an update has {len(self.names)} names, {len(self.dtype_names)} dtypes and {len(self.shapes)} shapes"
            )


class GlooTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives weights by gloo broadcasts and loads them by vLLM's layerwise reload."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group: ProcessGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Joins the sender's group; a group that was joined before is left first (the sender may have restarted)."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=init_info.timeout)
        address, port = init_info.master_address, init_info.master_port
        # What stateless_init_torch_distributed_process_group does, whose own timeout is torch's 30 minutes.
        store = TCPStore(address, port, is_master=False, timeout=timeout)
        self.group = init_gloo_process_group(
            PrefixStore(f"tcp://{address}:{port}", store), rank, init_info.world_size, timeout
        )

    def start_weight_update(self) -> None:
        """Makes the model ready to take checkpoint-layout tensors."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives and loads the tensors of one announcement.

        The base class ends in `torch.accelerator.synchronize()`, which fails where there is no accelerator. A gloo
        broadcast is complete when it returns, so there is nothing to wait for.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """One broadcast a tensor, loaded as it arrives: never more than one full tensor beside the model."""
        if self.group is None:
            raise RuntimeError("weights were sent before init_weight_transfer_engine")
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with disable_mtp_completeness_check():
            for name, dtype_name, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            ):
                dtype = getattr(torch, dtype_name, None)
                if not isinstance(dtype, torch.dtype):
                    raise ValueError(f"{name}: {dtype_name!r} is not a torch dtype")
                weight = torch.empty(shape, dtype=dtype)
                self.group.broadcast(weight, 0).wait()
                self.model.load_weights([(name, weight.to(self.device))])

    def finish_weight_update(self) -> None:
        """Brings the loaded tensors into the layout that the kernels read."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)

    def shutdown(self) -> None:
        """Leaves the group."""
        if self.group is not None:
            self.group.shutdown()
        self.group = None
