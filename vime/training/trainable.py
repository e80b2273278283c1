"""A model in training: Megatron's data parallelism, optimizer and learning rate around it, and its passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from vime.config import Config, Training
from vime.models.hf_folder import torch_dtype
from vime.training.collectives import first_known
from vime.training.experience import Experience
from vime.training.model import Policy, assemble, inputs
from vime.training.pack import Pack

Step = Callable[..., Any]
"""Megatron's forward step: (iterator over the items, model) -> (output, function of the output)."""


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer update. results: what the step said of each microbatch, on the last stage only."""

    results: list[Any]
    gradient_norm: float
    learning_rate: float


class Trainable:
    """A model with its optimizer. Every method is a collective over all trainer ranks."""

    def __init__(self, chunks: Sequence[Policy], config: Config, training: Training) -> None:
        """chunks: this rank's part of the model. training: the optimizer's settings."""
        self.chunks = list(chunks)
        self.modules = _data_parallel(self.chunks, config)
        self.optimizer = _optimizer(self.modules, training)
        self.scheduler = _scheduler(self.optimizer, training)

    def update(self, step: Step, items: Sequence[Experience], what: str) -> UpdateResult:
        """One optimizer update by the gradient of the items' losses. `step` returns (loss, token count 0, result).

        what: which update this is, for an error.
        Raises RuntimeError when the gradient is not finite, before anything is updated.
        """
        for module in self.modules:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = _schedule(self.modules, step, items, _size(item.microbatch.pack for item in items))
        # Megatron's own step() looks for NaN only with a loss scale: the weights would have it before the norm is seen.
        self.optimizer.prepare_grads()
        gradient_norm = float(self.optimizer.get_grad_norm() or 0.0)
        if not math.isfinite(gradient_norm):
            raise RuntimeError(f"{what}: {self._strange(gradient_norm, items)}")
        self._clip(gradient_norm)
        self.optimizer.step_with_ready_grads()
        rate = float(self.optimizer.param_groups[0]["lr"])
        return UpdateResult(results, gradient_norm, rate)

    def batch_done(self) -> None:
        """Go on in the learning rate's schedule, which counts batches."""
        self.scheduler.step(increment=1)

    def _clip(self, gradient_norm: float) -> None:
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            parameters, limit = optimizer.get_parameters(), optimizer.config.clip_grad
            if parameters and limit > 0:
                clip_grad_by_total_norm_fp32(parameters, limit, gradient_norm)

    def _strange(self, gradient_norm: float, items: Sequence[Experience]) -> str:
        """One line about a gradient that is not finite, the same on every rank."""
        sample = first_known(next((s for s in (item.strange_sample() for item in items) if s is not None), None))
        gradients = (
            (name, parameter.main_grad)
            for chunk in self.chunks
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad
        )
        parameter = first_known(next((name for name, one in gradients if not torch.isfinite(one).all()), None))
        where = [
            f"first in {parameter}" if parameter is not None else "",
            f"from sample {sample} of the batch" if sample is not None else "",
        ]
        places = ", ".join(filter(None, where))
        return f"the gradient's norm is {gradient_norm}{f' ({places})' if places else ''}: the weights are as before"


def forward(chunks: Sequence[Policy], packs: Sequence[Pack]) -> list[Tensor | None]:
    """Forward passes without gradient: the output for each pack on the last stage, None on the others."""
    with torch.no_grad():
        outputs = _schedule(chunks, _score_pack, packs, _size(packs), forward_only=True)
    return outputs if outputs else [None] * len(packs)


def _score_pack(items: Iterator[Pack], network: Any) -> tuple[Tensor, Callable[..., Any]]:
    packed = next(items)
    return network(**inputs(packed)), lambda output, non_loss_data: assemble(output, packed)


def _size(packs: Iterable[Pack]) -> int:
    """Size of the packs where all are equal, which matters with virtual stages only."""
    return max(pack.size for pack in packs)


def _schedule(
    modules: Sequence[Any], step: Step, items: Sequence[Any], size: int, *, forward_only: bool = False
) -> list[Any]:
    """Run `step` over the items in Megatron's pipeline schedule: what the last stage collected, else nothing."""
    several = len(modules) > 1
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(items) for _ in modules] if several else iter(items),
        model=list(modules) if several else modules[0],
        num_microbatches=len(items),
        seq_length=size,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


def _data_parallel(chunks: Sequence[Policy], config: Config) -> list[DistributedDataParallel]:
    overlap = config.cluster.device == "cuda"
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=config.training.distributed_optimizer,
        check_for_nan_in_grad=False,  # `update` looks at the norm of the whole gradient
    )
    modules = [
        # Only the first chunk's gradients are reduced while others are still computed.
        DistributedDataParallel(chunk.config, ddp, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    shared = chunks[0].config
    no_syncs = [module.no_sync for module in modules]
    shared.no_sync_func = (no_syncs if len(modules) > 1 else no_syncs[0]) if overlap else None
    # Token weights already divide by the global batch: pass no token count, by which Megatron would divide again.
    shared.finalize_model_grads_func = lambda chunks, tokens, **rest: finalize_model_grads(chunks, None, **rest)
    for module in modules:
        module.broadcast_params()
    return modules


def _optimizer(modules: list[DistributedDataParallel], training: Training) -> MegatronOptimizer:
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
        modules,
        use_gloo_process_groups=False,
    )
    modules[0].module.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _scheduler(optimizer: MegatronOptimizer, training: Training) -> OptimizerParamScheduler:
    """The learning rate of training.steps batches: step w of a warm-up of w steps has the peak.

    Megatron counts the steps that are done, which are none at the first. A decay ends after the last step, so that this
    one still learns when the least rate is 0.
    """
    warmup = max(training.warmup_steps - 1, 0)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=training.learning_rate / max(training.warmup_steps, 1),
        max_lr=training.learning_rate,
        min_lr=min(training.min_learning_rate, training.learning_rate),
        lr_warmup_steps=warmup,
        lr_decay_steps=max(training.steps, warmup + 1),
        lr_decay_style=training.schedule,
        start_wd=training.weight_decay,
        end_wd=training.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
