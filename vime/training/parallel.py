"""Process groups: torch.distributed on the run's own TCPStore, and Megatron's division of the ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from vime.config import Config


def initialize(config: Config, store: dist.Store, rank: int, world_size: int) -> None:
    """Join the trainer's process group and divide it into tensor, pipeline and data-parallel groups.

    store: the run's TCPStore, seen through a prefix of the trainer's own.
    """
    training = config.training
    cuda = config.cluster.device == "cuda"
    timeout = timedelta(seconds=training.timeout)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=training.tensor_parallel,
        pipeline_model_parallel_size=training.pipeline_parallel,
        distributed_timeout_minutes=max(1, int(training.timeout // 60)),
        create_gloo_process_groups=False,
    )
    torch.manual_seed(config.run.seed)
    model_parallel_cuda_manual_seed(config.run.seed)


def shutdown() -> None:
    """Leave the groups. A rank that ends without this can make its peers report a lost connection."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def tensor_rank() -> int:
    """This rank's place among those that share its layers."""
    return int(parallel_state.get_tensor_model_parallel_rank())


def data_rank() -> int:
    """This rank's model replica."""
    return int(parallel_state.get_data_parallel_rank())


def is_first_replica() -> bool:
    """Whether this rank belongs to the model replica that speaks for all (export, weight transfer, verification)."""
    return data_rank() == 0


def is_last_stage() -> bool:
    """Whether this rank computes logprobs and the loss."""
    return bool(parallel_state.is_pipeline_last_stage())


def last_stage_rank() -> int:
    """Global rank of the last pipeline stage in this rank's pipeline."""
    return int(parallel_state.get_pipeline_model_parallel_last_rank())


def pipeline_group() -> dist.ProcessGroup:
    """The ranks that hold the other stages of this rank's model replica."""
    return parallel_state.get_pipeline_model_parallel_group()


def replica_group() -> dist.ProcessGroup:
    """The ranks of this rank's model replica, over tensor and pipeline parallelism."""
    return parallel_state.get_model_parallel_group()
