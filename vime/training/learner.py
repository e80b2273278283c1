"""The policy in training: model, optimizer, learning rate, and the reference model when a loss needs one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime.algorithms.masking import NonFiniteLogprob
from vime.buffer.sample import Sample
from vime.config import Config
from vime.models.family import architecture
from vime.models.hf_folder import HfReader
from vime.training import hf_weights, model, parallel
from vime.training.batch import Batch, Microbatch
from vime.training.batching import divide
from vime.training.loss import Sum, microbatch_loss
from vime.training.pack import Pack, pack
from vime.training.trainable import Trainable, forward


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
        self.trainable = Trainable(self.policy, config, config.training)
        self.optimizer, self.scheduler = self.trainable.optimizer, self.trainable.scheduler
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
        step = partial(_train_microbatch, self.config)
        updated = self.trainable.update(step, list(zip(batch.microbatches, references, strict=True)))
        total = _sum_over_ranks(updated.sums).tolist()
        metrics = {
            "train/loss": total[Sum.LOSS],
            "train/pg_loss": total[Sum.POLICY],
            "train/kl_loss": total[Sum.KL],
            "train/entropy_loss": total[Sum.ENTROPY],
            "train/pg_clipfrac": total[Sum.CLIPPED],
            "train/grad_norm": updated.gradient_norm,
            "train/lr": updated.learning_rate,
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
        return forward(policy, _score_pack, packs, self.config.training.max_tokens_per_microbatch)


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


def _sum_over_ranks(sums: list[Tensor]) -> Tensor:
    """float64 [len(Sum)]: each microbatch counted once, by the first tensor-parallel rank of its last stage."""
    total = torch.zeros(len(Sum), dtype=torch.float64, device=torch.device(torch.cuda.current_device()))
    if parallel.is_last_stage() and parallel.tensor_rank() == 0:
        total += torch.stack(sums).double().sum(dim=0)
    dist.all_reduce(total)
    return total
