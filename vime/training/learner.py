"""The policy in training, with the models that its loss needs: reference policy, teacher, critic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from vime.models.routing import replayed_routing
from vime.training import hf_import, model, parallel
from vime.training.balance import divide_into_packs
from vime.training.batch import Batch
from vime.training.collectives import sum_over_ranks
from vime.training.critic import Critic
from vime.training.experience import Experience, Scores, gather, rewards_of_tokens
from vime.training.frozen import Frozen
from vime.training.loss import microbatch_loss
from vime.training.metrics import MicrobatchMetrics, over_ranks
from vime.training.pack import Pack, pack_all
from vime.training.replay import Replay
from vime.training.trainable import Trainable, forward


class Learner:
    """This rank's part of the policy and of its optimizer. Every method is a collective over all trainer ranks."""

    def __init__(self, config: Config, folder: Path) -> None:
        """Build and load the policy of a Hugging Face folder. Raises UserError when it is not supported."""
        self.config = config
        found = architecture(folder)
        self.policy = model.build(found, config, model.Policy)
        """This rank's chunks of the model."""
        hf_import.load(self.policy, HfReader(folder))
        alone = config.algorithm.critic.critic_only_steps if config.algorithm.name == "ppo" else 0
        steps = max(config.training.steps - alone, 1)
        self.trainable = Trainable(self.policy, config, config.training.model_copy(update={"steps": steps}))
        self.optimizer, self.scheduler = self.trainable.optimizer, self.trainable.scheduler
        routing = replayed_routing(config, folder)
        self.replay = Replay(self.policy, routing) if routing is not None else None
        """What binds the engines' choices of experts to the policy's routers, and to no other model's."""
        self.scoring_seconds = 0.0
        """Seconds that the last step spent on forward passes before its update."""
        algorithm = config.algorithm
        vocabulary_size = found.shape.vocabulary
        self.reference: Frozen | None = None
        if algorithm.needs_reference:
            origin = folder if algorithm.reference == "initial" else Path(algorithm.reference)
            self.reference = Frozen(origin, config, vocabulary_size, "algorithm.reference")
        self.teacher: Frozen | None = None
        if isinstance(algorithm.teacher, Path):
            self.teacher = Frozen(algorithm.teacher, config, vocabulary_size, "algorithm.teacher")
        self.critic = Critic(folder, config) if algorithm.name == "ppo" else None

    def train(self, batch: Batch) -> dict[str, float]:
        """One step on a batch. Returns its `train/` metrics, the same on every rank; means over the step's updates.

        Raises RuntimeError when a gradient is not finite, UserError when custom logic fails.
        """
        started = time.monotonic()
        algorithm = self.config.algorithm
        scores = self._scores([microbatch.pack for microbatch in batch.microbatches])
        self.scoring_seconds = time.monotonic() - started
        metrics: dict[str, float] = {}
        alone = self.critic is not None and self.critic.alone
        if self.critic is not None and self.critic.once:
            rewards = rewards_of_tokens(batch, scores, algorithm)
            values, metrics = self.critic.train_once(batch.microbatches, rewards, algorithm, batch.step)
            scores = replace(scores, values=values)
        gathered = gather(batch, scores, algorithm)
        minibatches = batch.by_minibatch(gathered.items)
        if self.critic is not None and not self.critic.once:
            metrics = self.critic.train(minibatches, batch.step)
        metrics |= gathered.metrics
        if alone:
            return metrics
        step = partial(_train_microbatch, self.config)
        updates = [self.trainable.update(step, items, f"step {batch.step}") for items in minibatches]
        self.trainable.batch_done()
        if self.replay is not None:
            self.replay.finish()
            replayed = sum_over_ranks(torch.tensor(sum(microbatch.replayed for microbatch in batch.microbatches)))
            metrics = metrics | {"train/routing_replay_coverage": float(replayed) / batch.trained_tokens}
        every = algorithm.reference_refresh
        if self.reference is not None and every and self.scheduler.num_steps % every == 0:
            self.reference.copy(self.policy)
        metrics |= over_ranks([microbatch for update in updates for microbatch in update.results])
        norm = sum(update.gradient_norm for update in updates) / len(updates)
        return metrics | {
            "train/grad_norm": norm,
            "train/lr": updates[0].learning_rate,
            "train/skipped_minibatches": float(len(batch.untrained)),
        }

    def _scores(self, packs: Sequence[Pack]) -> Scores:
        """The passes before the update that its result needs, and no other."""
        outputs = self._score(packs) if self.config.algorithm.needs_policy_before else ()
        return Scores(
            policy_logprobs=[output[0] if output is not None else None for output in outputs],
            reference_logprobs=self.reference.logprobs(packs) if self.reference is not None else (),
            teacher_logprobs=self._teacher_logprobs(packs),
            values=self.critic.values(packs) if self.critic is not None and not self.critic.once else (),
        )

    def _teacher_logprobs(self, packs: Sequence[Pack]) -> Sequence[Tensor | None]:
        if self.teacher is not None:
            return self.teacher.logprobs(packs)
        url = self.config.algorithm.teacher_url
        if url is None:
            return ()
        if any(pack.teacher_logprobs is None for pack in packs):
            raise RuntimeError(f"samples of the batch have no logprobs of algorithm.teacher={url}")
        return [pack.teacher_logprobs for pack in packs]

    def score(self, samples: Sequence[Sample], temperature: float) -> list[Tensor]:
        """The policy's logprobs of each sample's trained tokens, float32, on every rank. Each replica scores all."""
        layout = parallel.pack_layout()
        (divided,) = divide_into_packs([len(sample.token_ids) for sample in samples], 1, self.config.training, layout)
        equal = self.config.training.virtual_stages > 1
        packs = pack_all([[samples[i] for i in positions] for positions in divided], layout, equal=equal)
        trained_at = model.set_temperature(self.policy, temperature)
        try:
            outputs = self._score(packs)
        finally:
            model.set_temperature(self.policy, trained_at)
        result: list[Tensor] = [torch.empty(0)] * len(samples)
        for positions, packed, output in zip(divided, packs, outputs, strict=True):
            logprobs = output[0].contiguous() if output is not None else torch.empty_like(packed.rollout_logprobs)
            if self.config.training.pipeline_parallel > 1:
                dist.broadcast(logprobs, src=parallel.last_stage_rank(), group=parallel.pipeline_group())
            for number, i in enumerate(positions):
                result[i] = logprobs[packed.sample == number].cpu()
        return result

    def _score(self, packs: Sequence[Pack]) -> list[Tensor | None]:
        """Forward passes alone: float32 [2, labelled tokens] a pack on the last stage, None on the others."""
        return forward(self.policy, packs)


def _train_microbatch(config: Config, items: Iterator[Experience], module: Any) -> tuple[Tensor, Callable[..., Any]]:
    experience = next(items)
    microbatch = experience.microbatch
    output = module(**model.inputs(microbatch.pack))

    def loss_function(output: Tensor) -> tuple[Tensor, Tensor, MicrobatchMetrics]:
        try:
            output = experience.watched(model.assemble(output, microbatch.pack))
            loss, metrics = microbatch_loss(output, experience, config.algorithm)
        except NonFiniteLogprob as error:
            sample = int(microbatch.owners[error.index])
            raise RuntimeError(
                f"sample {sample} of the batch: {error.name} is {error.value} on a trained token"
            ) from error
        # The second value divides gradients when Megatron averages by tokens; Trainable's finalize does not.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), metrics

    return output, loss_function
