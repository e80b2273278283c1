"""PPO's critic: a Megatron model with a value head in place of the output layer, and its own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from vime.algorithms.aggregation import weighted_sum
from vime.algorithms.losses import value_loss
from vime.algorithms.masking import NonFiniteLogprob
from vime.algorithms.metrics import Metric
from vime.config import Algorithm, Config
from vime.models.family import architecture
from vime.models.hf_folder import HfReader
from vime.training import hf_import, model
from vime.training.batch import Microbatch
from vime.training.experience import Experience, token_advantages
from vime.training.metrics import MicrobatchMetrics, over_ranks, reduced
from vime.training.pack import IGNORE, Pack
from vime.training.trainable import Trainable, UpdateResult, forward


class ValueHead(nn.Module):
    """One number from a hidden state. It begins with 0, so that the first advantages are the rewards themselves."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, width] -> float32 [1, tokens]."""
        return (hidden @ self.weight.t()).t().float()


class ValueModel(model.Policy):
    """A policy's network that says how much reward is still to come, instead of which token."""

    def become(self) -> None:
        """Put the value head in place of the output layer, once the weights of a policy are loaded."""
        self.share_embeddings_and_output_weights = False  # the embedding is not an output layer any more
        for parameter in self.parameters():
            if getattr(parameter, "shared_embedding", False):
                parameter.shared_embedding = parameter.shared = False  # type: ignore[attr-defined]
        if self.post_process:
            self.output_layer = ValueHead(self.config.hidden_size, self.config.params_dtype).cuda()

    def _postprocess(self, hidden_states: Tensor, labels: Tensor | None = None, **rest: Any) -> Tensor:  # type: ignore[override]
        """Hidden states [tokens (/ TP), 1, width], labels [tokens] -> float32 [1, labelled tokens] on the last stage.

        The value of the state in which each labelled token was chosen. Every tensor-parallel rank computes all of it,
        and so the whole gradient.
        """
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **rest)
        hidden = hidden_states
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return self.output_layer(hidden.squeeze(1)[labels != IGNORE])


class Critic:
    """The critic in training. Its methods are collectives over all trainer ranks."""

    def __init__(self, folder: Path, config: Config) -> None:
        """folder: of the initial policy. Raises UserError when the model is not supported."""
        self.settings = config.algorithm.critic
        self._minibatches = config.algorithm.minibatches
        folder = self.settings.path or folder
        self.chunks = model.build(architecture(folder), config, ValueModel)
        hf_import.load(self.chunks, HfReader(folder))
        for chunk in self.chunks:
            chunk.become()
        training = config.training.model_copy(
            update={"learning_rate": self.settings.learning_rate, "warmup_steps": self.settings.warmup_steps}
        )
        self.trainable = Trainable(self.chunks, config, training)

    @property
    def alone(self) -> bool:
        """Whether the next step is one of those in which only the critic learns."""
        return self.trainable.scheduler.num_steps < self.settings.critic_only_steps

    @property
    def once(self) -> bool:
        """Whether a batch is one update: its values before the update come with it, without a pass of their own."""
        return self.settings.updates * self._minibatches == 1

    def values(self, packs: Sequence[Pack]) -> list[Tensor | None]:
        """Float32 [labelled tokens] of each pack on the last stage, None on the others."""
        outputs = forward(self.chunks, packs)
        return [output[0] if output is not None else None for output in outputs]

    def train_once(
        self, microbatches: Sequence[Microbatch], rewards: Sequence[Tensor], algorithm: Algorithm, step: int
    ) -> tuple[Sequence[Tensor | None], dict[str, float]]:
        """One update by a whole batch: the values before it, as `values` gives them, and the metrics.

        rewards: of each token, from which and from the values the targets are made on the way.
        """
        items = [Experience(one, rewards=reward) for one, reward in zip(microbatches, rewards, strict=True)]
        updated = self.trainable.update(partial(_train_at_once, algorithm), items, f"step {step}, critic")
        self.trainable.batch_done()
        values = [one[1] for one in updated.results]
        updated = replace(updated, results=[one[0] for one in updated.results])
        return values or [None] * len(items), self._metrics([updated])

    def train(self, minibatches: Sequence[Sequence[Experience]], step: int) -> dict[str, float]:
        """An update by each minibatch, `critic.updates` times. Metrics: means over the last time, on every rank."""
        train_pack = partial(_train_pack, self.settings.value_clip)
        every = [items for _ in range(self.settings.updates) for items in minibatches]
        done = [self.trainable.update(train_pack, items, f"step {step}, critic") for items in every]
        self.trainable.batch_done()
        return self._metrics(done[-len(minibatches) :])

    def _metrics(self, last: Sequence[UpdateResult]) -> dict[str, float]:
        return over_ranks([microbatch for updated in last for microbatch in updated.results]) | {
            "train/critic_grad_norm": sum(updated.gradient_norm for updated in last) / len(last),
            "train/critic_lr": last[0].learning_rate,
        }


def _train_pack(value_clip: float, items: Iterator[Experience], module: Any) -> tuple[Tensor, Callable[..., Any]]:
    experience = next(items)
    microbatch = experience.microbatch

    def loss_function(output: Tensor) -> tuple[Tensor, Tensor, MicrobatchMetrics]:
        old_values, returns = experience.values, experience.returns
        assert old_values is not None, "the last stage knows the values"
        assert returns is not None, "the last stage knows the returns"
        values = experience.watched(model.assemble(output, microbatch.pack))[0]
        loss, metrics = _loss(values, old_values, returns, microbatch, value_clip)
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), metrics

    return module(**model.inputs(microbatch.pack)), loss_function


def _train_at_once(algorithm: Algorithm, items: Iterator[Experience], module: Any) -> tuple[Tensor, Callable[..., Any]]:
    experience = next(items)
    microbatch, rewards = experience.microbatch, experience.rewards
    assert rewards is not None, "rewards are known before the values"

    def loss_function(output: Tensor) -> tuple[Tensor, Tensor, tuple[MicrobatchMetrics, Tensor]]:
        values = experience.watched(model.assemble(output, microbatch.pack))[0]
        old_values = values.detach()
        _, returns = token_advantages(rewards, old_values, microbatch, algorithm)
        loss, metrics = _loss(values, old_values, returns, microbatch, algorithm.critic.value_clip)
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), (metrics, old_values)

    return module(**model.inputs(microbatch.pack)), loss_function


def _loss(
    values: Tensor, old_values: Tensor, returns: Tensor, microbatch: Microbatch, value_clip: float
) -> tuple[Tensor, MicrobatchMetrics]:
    try:
        losses, clipped = value_loss(values, old_values, returns, microbatch.mask, value_clip)
    except NonFiniteLogprob as error:
        sample = int(microbatch.owners[error.index])
        raise RuntimeError(f"sample {sample} of the batch: {error.name} is {error.value}, from the critic") from error
    metrics = {"train/value_loss": Metric(losses), "train/value_clipfrac": Metric(clipped.float())}
    return weighted_sum(losses, microbatch.metric_weights), reduced(metrics, microbatch.metric_weights)
