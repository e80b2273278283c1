"""A model in training: Megatron's data parallelism, optimizer and learning rate around it, and its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from vime.config import Config, Training
from vime.models.hf_folder import torch_dtype
from vime.training.model import Policy

Step = Callable[..., Any]
"""Megatron's forward step: (iterator over the items, model) -> (output, function of the output)."""


@dataclass(frozen=True)
class Updated:
    """One optimizer update. sums: of each microbatch, on the last stage only."""

    sums: list[Tensor]
    gradient_norm: float
    learning_rate: float


class Trainable:
    """A model with its optimizer. Every method is a collective over all trainer ranks."""

    def __init__(self, network: Policy, config: Config, training: Training) -> None:
        """training: the optimizer's settings."""
        self.network = network
        self._tokens = config.training.max_tokens_per_microbatch
        self.module = _data_parallel(network, config)
        self.optimizer = _optimizer(self.module, training)
        self.scheduler = _scheduler(self.optimizer, training)

    def update(self, step: Step, items: Sequence[Any]) -> Updated:
        """One optimizer update by the gradient of the items' losses. `step` returns (loss, token count 0, sums).

        Raises RuntimeError when the gradient is not finite.
        """
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = _schedule(self.module, step, items, self._tokens, forward_only=False)
        finite, gradient_norm, _ = self.optimizer.step()
        if not finite:
            raise RuntimeError("the gradient has NaN or infinite values: nothing was updated")
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.scheduler.step(increment=1)
        return Updated(sums, float(gradient_norm or 0.0), rate)


def forward(network: Policy, step: Step, items: Sequence[Any], tokens: int) -> list[Any]:
    """Forward passes without gradient: what `step` collects of each item on the last stage, None on the others.

    tokens: the most that one item has.
    """
    with torch.no_grad():
        outputs = _schedule(network, step, items, tokens, forward_only=True)
    return outputs if outputs else [None] * len(items)


def _schedule(module: Any, step: Step, items: Sequence[Any], tokens: int, *, forward_only: bool) -> list[Any]:
    """Run `step` over the items in Megatron's pipeline schedule: what the last stage collected, else nothing."""
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(items),
        model=module,
        num_microbatches=len(items),
        seq_length=tokens,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


def _data_parallel(policy: Policy, config: Config) -> DistributedDataParallel:
    overlap = config.cluster.device == "cuda"
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=config.training.distributed_optimizer,
        check_for_nan_in_grad=False,  # the optimizer step checks the reduced gradient
    )
    module = DistributedDataParallel(policy.config, ddp, policy)
    policy.config.no_sync_func = module.no_sync if overlap else None
    # Token weights already divide by the global batch: pass no token count, by which Megatron would divide again.
    policy.config.finalize_model_grads_func = lambda chunks, tokens, **rest: finalize_model_grads(chunks, None, **rest)
    module.broadcast_params()
    return module


def _optimizer(module: DistributedDataParallel, training: Training) -> MegatronOptimizer:
    dtype = torch_dtype(training.dtype)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=training.learning_rate,
            min_lr=training.min_learning_rate,
            weight_decay=training.weight_decay,
            adam_beta1=training.adam_beta1,
            adam_beta2=training.adam_beta2,
            adam_eps=training.adam_eps,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            clip_grad=training.clip_grad,
            use_distributed_optimizer=training.distributed_optimizer,
        ),
        [module],
        use_gloo_process_groups=False,
    )
    policy_config = module.module.config
    policy_config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _scheduler(optimizer: MegatronOptimizer, training: Training) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if training.warmup_steps == 0 else training.learning_rate / training.warmup_steps,
        max_lr=training.learning_rate,
        min_lr=min(training.min_learning_rate, training.learning_rate),
        lr_warmup_steps=training.warmup_steps,
        lr_decay_steps=max(training.steps, training.warmup_steps + 1),
        lr_decay_style=training.schedule,
        start_wd=training.weight_decay,
        end_wd=training.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
