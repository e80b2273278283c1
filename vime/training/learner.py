"""The policy in training: model, optimizer, learning rate, and the reference model when a loss needs one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from vime.algorithms.masking import NonFiniteLogprob
from vime.buffer.sample import Sample
from vime.config import Config, Training
from vime.models.family import architecture
from vime.models.hf_folder import HfReader, torch_dtype
from vime.training import hf_weights, model, parallel
from vime.training.batch import Batch, Microbatch
from vime.training.batching import divide
from vime.training.loss import Sum, microbatch_loss
from vime.training.pack import Pack, pack


class Learner:
    """This rank's part of the policy and of its optimizer. Every method is a collective over all trainer ranks."""

    def __init__(self, config: Config, folder: Path) -> None:
        """Build and load the policy of a Hugging Face folder. Raises UserError when it is not supported."""
        self.config = config
        shape = architecture(folder)
        if shape.layers % config.training.pipeline_parallel:
            raise ValueError(
                f"{shape.layers} layers do not divide by training.pipeline_parallel={config.training.pipeline_parallel}"
            )
        self.policy = model.build(shape, config)
        hf_weights.load(self.policy, HfReader(folder))
        self.module = _data_parallel(self.policy, config)
        self.optimizer = _optimizer(self.module, config.training)
        self.scheduler = _scheduler(self.optimizer, config.training)
        self.scoring_seconds = 0.0
        """Seconds that the last step spent on forward passes before its update."""
        self.reference: model.Policy | None = None
        if config.algorithm.kl_coefficient > 0:
            self.reference = model.build(shape, config).requires_grad_(False).eval()
            hf_weights.load(self.reference, HfReader(folder))

    def train(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on a batch. Returns the step's `train/` metrics, the same on every rank.

        Raises RuntimeError when the gradient is not finite.
        """
        started = time.monotonic()
        references: Sequence[Tensor | None] = [None] * len(batch.microbatches)
        if self.reference is not None:
            references = [
                output[0] if output is not None else None
                for output in self._score([m.pack for m in batch.microbatches], self.reference)
            ]
        self.scoring_seconds = time.monotonic() - started
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()
        step = partial(_train_microbatch, self.config)
        sums = self._schedule(step, list(zip(batch.microbatches, references, strict=True)), forward_only=False)
        finite, gradient_norm, _ = self.optimizer.step()
        if not finite:
            raise RuntimeError("the gradient has NaN or infinite values: nothing was updated")
        rate = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(increment=1)
        total = _sum_over_ranks(sums).tolist()
        metrics = {
            "train/loss": total[Sum.LOSS],
            "train/pg_loss": total[Sum.POLICY],
            "train/kl_loss": total[Sum.KL],
            "train/entropy_loss": total[Sum.ENTROPY],
            "train/pg_clipfrac": total[Sum.CLIPPED],
            "train/grad_norm": float(gradient_norm or 0.0),
            "train/lr": float(rate),
        }
        if self.config.algorithm.name != "sft":  # demonstrations have no rollout logprobs
            metrics["train/train_rollout_logprob_abs_diff"] = total[Sum.LOGPROB_DIFFERENCE]
        return metrics

    def score(self, samples: Sequence[Sample], temperature: float) -> list[Tensor]:
        """The policy's logprobs of each sample's trained tokens, float32, on every rank. Each replica scores all."""
        (parts,) = divide(
            [len(sample.token_ids) for sample in samples], 1, self.config.training.max_tokens_per_microbatch
        )
        packs = [pack([samples[i] for i in part], multiple=self.config.training.tensor_parallel) for part in parts]
        before, self.policy.temperature = self.policy.temperature, temperature
        try:
            outputs = self._score(packs, self.policy)
        finally:
            self.policy.temperature = before
        result: list[Tensor] = [torch.empty(0)] * len(samples)
        for part, packed, output in zip(parts, packs, outputs, strict=True):
            logprobs = output[0].contiguous() if output is not None else torch.empty_like(packed.rollout_logprobs)
            if self.config.training.pipeline_parallel > 1:
                dist.broadcast(logprobs, src=parallel.last_stage_rank(), group=parallel.pipeline_group())
            for place, i in enumerate(part):
                result[i] = logprobs[packed.sample == place].cpu()
        return result

    def _score(self, packs: Sequence[Pack], policy: model.Policy) -> list[Tensor | None]:
        """Forward passes alone: float32 [2, labelled tokens] a pack on the last stage, None on the others."""
        with torch.no_grad():
            outputs = self._schedule(_score_pack, list(packs), forward_only=True, module=policy)
        return outputs if outputs else [None] * len(packs)

    def _schedule(
        self, step: Callable[..., Any], items: list[Any], *, forward_only: bool, module: Any = None
    ) -> list[Any]:
        """Run `step` over the items in Megatron's pipeline schedule: what the last stage collected, else nothing."""
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(items),
            model=module if module is not None else self.module,
            num_microbatches=len(items),
            seq_length=self.config.training.max_tokens_per_microbatch,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results


def _train_microbatch(
    config: Config, items: Iterator[tuple[Microbatch, Tensor | None]], module: Any
) -> tuple[Tensor, Callable[..., Any]]:
    microbatch, reference = next(items)
    output = module(**model.inputs(microbatch.pack))

    def loss_function(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        try:
            loss, sums = microbatch_loss(output, microbatch, config.algorithm, reference)
        except NonFiniteLogprob as error:
            sample = microbatch.samples[int(microbatch.pack.sample[error.index])]
            raise RuntimeError(
                f"sample {sample} of the batch: {error.name} is {error.value} on a trained token"
            ) from error
        # The second value divides gradients when Megatron averages by tokens; `finalize` below does not.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), sums

    return output, loss_function


def _score_pack(items: Iterator[Pack], policy: Any) -> tuple[Tensor, Callable[..., Any]]:
    output = policy(**model.inputs(next(items)))
    return output, lambda output, non_loss_data: output


def _data_parallel(policy: model.Policy, config: Config) -> DistributedDataParallel:
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


def _sum_over_ranks(sums: list[Tensor]) -> Tensor:
    """float64 [len(Sum)]: each microbatch counted once, by the first tensor-parallel rank of its last stage."""
    total = torch.zeros(len(Sum), dtype=torch.float64, device=torch.device(torch.cuda.current_device()))
    if parallel.is_last_stage() and parallel.tensor_rank() == 0:
        total += torch.stack(sums).double().sum(dim=0)
    dist.all_reduce(total)
    return total
