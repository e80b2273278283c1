"""Process groups: torch.distributed on the run's own TCPStore, and Megatron's division of the ranks.

A pipeline stage is a run of neighbouring ranks, divided twice: into blocks of tensor x context parallel ranks, which
hold and run everything but the experts, and into blocks of expert-tensor x expert parallel ranks, which hold those.
"""

from __future__ import annotations

from datetime import timedelta
from math import lcm

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from vime.config import Config, Training
from vime.training.pack import PackLayout

_leading_group: dist.ProcessGroup | None = None


def initialize(config: Config, store: dist.Store, rank: int, world_size: int) -> None:
    """Join the trainer's process group and divide it by all kinds of parallelism.

    store: the run's TCPStore, seen through a prefix of the trainer's own.
    """
    global _leading_group
    training = config.training
    cuda = config.cluster.device == "cuda"
    timeout = timedelta(seconds=training.timeout)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=training.tensor_parallel,
        pipeline_model_parallel_size=training.pipeline_parallel,
        virtual_pipeline_model_parallel_size=training.virtual_stages if training.virtual_stages > 1 else None,
        context_parallel_size=training.context_parallel,
        expert_model_parallel_size=training.expert_parallel,
        expert_tensor_parallel_size=training.expert_tensor_parallel,
        distributed_timeout_minutes=max(1, int(training.timeout // 60)),
        create_gloo_process_groups=False,
    )
    _leading_group = dist.new_group(leading_ranks(training), timeout=timeout)
    torch.manual_seed(config.run.seed)
    model_parallel_cuda_manual_seed(config.run.seed)


def shutdown() -> None:
    """Leave the groups. A rank that ends without this can make its peers report a lost connection."""
    global _leading_group
    _leading_group = None
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def leading_ranks(training: Training) -> list[int]:
    """The leading ranks: the fewest that hold the whole model and can run it, the first ones of each stage.

    Blocks of both divisions must be whole, because each computes and exchanges tokens together.
    """
    stage = training.ranks // training.pipeline_parallel
    block = lcm(
        training.tensor_parallel * training.context_parallel,
        training.expert_tensor_parallel * training.expert_parallel,
    )
    return [first + place for first in range(0, training.ranks, stage) for place in range(block)]


def leading_group() -> dist.ProcessGroup:
    """The group of the leading ranks, of which this rank is one."""
    assert _leading_group is not None, "initialize first"
    return _leading_group


def is_leading() -> bool:
    """Whether this rank is one of those that speak for all (export, weight transfer, verification)."""
    return bool(dist.get_rank(leading_group()) >= 0)


def place_in_stage() -> int:
    """This rank's place among the ranks of its pipeline stage."""
    stage_ranks = dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
    return dist.get_rank() % stage_ranks


def pack_layout() -> PackLayout:
    """What this rank takes of a pack."""
    return PackLayout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
    )


def tensor_rank() -> int:
    """This rank's place among those that share its layers."""
    return int(parallel_state.get_tensor_model_parallel_rank())


def context_rank() -> int:
    """This rank's place among those that share its sequences."""
    return int(parallel_state.get_context_parallel_rank())


def data_rank() -> int:
    """This rank's model replica."""
    return int(parallel_state.get_data_parallel_rank())


def is_last_stage() -> bool:
    """Whether this rank computes logprobs and the loss."""
    return bool(parallel_state.is_pipeline_last_stage())


def last_stage_rank() -> int:
    """Global rank of the last pipeline stage in this rank's pipeline."""
    return int(parallel_state.get_pipeline_model_parallel_last_rank())


def pipeline_group() -> dist.ProcessGroup:
    """The ranks that hold the other stages of this rank's model replica."""
    return parallel_state.get_pipeline_model_parallel_group()
