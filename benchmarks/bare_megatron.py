"""A training loop of Megatron-core alone, over packs that vime made: the peer of `training_step`.

The network, its attention module, DDP's and the optimizer's settings are vime's. What is left out is what vime adds:
logprobs in chunks, entropies, the policy loss with its checks, metrics and their sum over ranks, a schedule. Instead
there is the plain way: logits of all tokens, Megatron's own cross-entropy per token, its masked mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from vime.config import Training
from vime.models.family import Architecture
from vime.training.model import block_spec, transformer_config
from vime.training.pack import IGNORE, Pack


class BareLoop:
    """A GPTModel in float32 on the CPU, data parallel over all ranks."""

    def __init__(self, architecture: Architecture, training: Training, weights: dict[str, Any]) -> None:
        """weights: a state dict of vime's policy, which is a GPTModel too."""
        config = transformer_config(architecture, training, fused=False)
        config.calculate_per_token_loss = False  # Megatron's default: it averages over microbatches and ranks
        self.model = GPTModel(
            config,
            block_spec(architecture, config, None),
            vocab_size=architecture.shape.vocabulary,
            max_sequence_length=architecture.shape.context,
            share_embeddings_and_output_weights=architecture.shape.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=architecture.rotary_base,  # type: ignore[arg-type]
        )
        self.model.load_state_dict(weights)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=training.distributed_optimizer
        )
        self.module = DistributedDataParallel(config, ddp, self.model)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=training.learning_rate,
            weight_decay=training.weight_decay,
            adam_beta1=training.adam_beta1,
            adam_beta2=training.adam_beta2,
            adam_eps=training.adam_eps,
            clip_grad=training.clip_grad,
            use_distributed_optimizer=training.distributed_optimizer,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.module], use_gloo_process_groups=False)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self._longest = training.max_tokens_per_microbatch

    def train(self, packs: Sequence[Pack]) -> None:
        """One optimizer step."""
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(packs),
            model=self.module,
            num_microbatches=len(packs),
            seq_length=self._longest,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()

    @torch.no_grad()
    def loss(self, pack: Pack) -> float:
        """Mean negative log-likelihood of a pack's labelled tokens."""
        output, mean = _forward(iter([pack]), self.model)
        return float(mean(output)[0])


def _forward(packs: Iterator[Pack], module: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    pack = next(packs)
    mask = (pack.labels != IGNORE).float()
    losses = module(
        input_ids=pack.token_ids.unsqueeze(0),
        position_ids=pack.position_ids.unsqueeze(0),
        attention_mask=None,
        labels=pack.labels.clamp(min=0).unsqueeze(0),
        packed_seq_params=pack.params,
    )

    def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (losses.view(-1) * mask).sum() / mask.sum()
        return loss, {"loss": loss.detach()}

    return losses, mean
