"""What a batch teaches: the advantage of each trained token, from rewards and from passes of the frozen models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vime.algorithms.advantages import ADVANTAGES, centred_rewards
from vime.algorithms.aggregation import sample_sums
from vime.algorithms.kl import kl_estimate
from vime.algorithms.returns import moments, standardized, token_rewards
from vime.config import Algorithm
from vime.config.import_path import call_by_name, load_function
from vime.errors import UserError
from vime.training.batch import Batch, Microbatch
from vime.training.collectives import moments_over_ranks, sum_over_ranks

PerPack = Sequence[Tensor | None]
"""A tensor a microbatch: float32 [labelled tokens] on the last pipeline stage, None on the others."""


@dataclass(frozen=True)
class Scores:
    """What passes before the update gave, for each microbatch; () for a pass that nothing needs.

    policy_logprobs, reference_logprobs, teacher_logprobs: of those models (a served teacher's came with the samples, on
    every stage). values: of the critic.
    """

    policy_logprobs: PerPack = ()
    reference_logprobs: PerPack = ()
    teacher_logprobs: PerPack = ()
    values: PerPack = ()


@dataclass(frozen=True)
class Experience:
    """A microbatch with what the last stage learns from: float32 [labelled tokens].

    advantages: None on other stages. policy_logprobs: of the policy before the step, when several updates need them.
    returns, values: the critic's targets and its values before the step. rewards: of each token, from which the critic
    makes its targets when its values come with the update.
    """

    microbatch: Microbatch
    advantages: Tensor | None = None
    policy_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    returns: Tensor | None = None
    values: Tensor | None = None
    rewards: Tensor | None = None
    output_gradients: list[Tensor] = field(default_factory=list)
    """Of the loss by the model's output, once it is known: [outputs, labelled tokens]."""

    def watched(self, output: Tensor) -> Tensor:
        """The model's output for this microbatch, whose gradient is kept."""
        if output.requires_grad:
            output.register_hook(self.output_gradients.append)
        return output

    def strange_sample(self) -> int | None:
        """The sample of the first token whose output has a gradient that is not finite."""
        for gradient in self.output_gradients:
            strange = (~torch.isfinite(gradient)).any(0).nonzero()
            if len(strange):
                return int(self.microbatch.owners[strange[0, 0]])
        return None


@dataclass(frozen=True)
class Experiences:
    """The experience of a batch, and what there is to say of it, the same on every rank."""

    items: list[Experience]
    metrics: dict[str, float] = field(default_factory=dict)


def gather(batch: Batch, scores: Scores, algorithm: Algorithm) -> Experiences:
    """Advantages for every microbatch. A collective over all trainer ranks.

    Raises UserError when a custom advantage function fails, ValueError when a reward is not finite.
    """
    none: PerPack = [None] * len(batch.microbatches)
    returns = none
    metrics: dict[str, float] = {}
    if algorithm.name == "sft":
        advantages: PerPack = [torch.ones_like(microbatch.loss_weights) for microbatch in batch.microbatches]
    elif algorithm.estimator in ADVANTAGES and ADVANTAGES[algorithm.estimator].of == "tokens":
        advantages, returns = _of_tokens(batch, scores, algorithm)
        if algorithm.normalizes:
            advantages = _standardized(advantages)
        if algorithm.name == "ppo":
            metrics = _explained(scores.values, returns)
    else:
        of_responses = _of_responses(batch, _penalties(batch, scores, algorithm), algorithm)
        advantages = [_of_owners(of_responses, microbatch) for microbatch in batch.microbatches]
    items = [
        Experience(*row)
        for row in zip(
            batch.microbatches,
            advantages,
            scores.policy_logprobs if algorithm.minibatches > 1 else none,
            scores.reference_logprobs or none,
            scores.teacher_logprobs or none,
            returns,
            scores.values or none,
            strict=True,
        )
    ]
    return Experiences(items, metrics)


def _of_owners(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Values [N] of the batch's samples -> [labelled tokens], that of each token's sample, on its device."""
    return values[microbatch.owners.cpu()].to(microbatch.owners.device)


def _penalties(batch: Batch, scores: Scores, algorithm: Algorithm) -> PerPack:
    """The KL term that is taken from each token's reward."""
    if not algorithm.kl_of_reward:
        return [None] * len(batch.microbatches)
    return [
        algorithm.kl_coefficient
        * kl_estimate(policy, reference, algorithm.kl_estimator, microbatch.mask, algorithm.kl_clamp)
        if policy is not None and reference is not None
        else None
        for microbatch, policy, reference in zip(
            batch.microbatches, scores.policy_logprobs, scores.reference_logprobs, strict=True
        )
    ]


def _of_responses(batch: Batch, penalties: PerPack, algorithm: Algorithm) -> Tensor:
    """Advantages [N] of whole responses, whose reward is less the sum of their tokens' penalties."""
    rewards = batch.rewards
    if algorithm.kl_of_reward:
        sums = torch.zeros(len(rewards), dtype=torch.float64)
        for microbatch, penalty in zip(batch.microbatches, penalties, strict=True):
            if penalty is not None:
                sums += sample_sums(penalty, microbatch.owners, len(rewards)).cpu()
        rewards = rewards - sum_over_ranks(sums).float().cpu()
    offered = {
        "rewards": rewards,
        "groups": batch.groups,
        "response_tokens": batch.response_tokens,
        "normalize_std": algorithm.normalizes,
    }
    path = algorithm.estimator
    if path in ADVANTAGES:
        result: Any = ADVANTAGES[path].call(offered)
    else:
        result = call_by_name(load_function(path, "algorithm.advantage"), offered, path, "algorithm.advantage")
    if not isinstance(result, Tensor) or result.shape != rewards.shape:
        what = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise UserError(f"algorithm.advantage={path} returned {what}; it must return a tensor [{len(rewards)}]")
    strange = (~torch.isfinite(result)).nonzero().flatten()
    if len(strange):
        raise UserError(f"algorithm.advantage={path} gave sample {int(strange[0])} {float(result[strange[0]])}")
    return result.detach().float()


def rewards_of_tokens(batch: Batch, scores: Scores, algorithm: Algorithm) -> list[Tensor]:
    """Reward float32 [labelled tokens] of each token, for each microbatch; without the KL term on earlier stages."""
    rewards = batch.rewards
    if algorithm.compares_group:
        rewards = centred_rewards(rewards, batch.groups)
    return [
        token_rewards(_of_owners(rewards, microbatch), microbatch.pack.sample, penalty)
        for microbatch, penalty in zip(batch.microbatches, _penalties(batch, scores, algorithm), strict=True)
    ]


def _of_tokens(batch: Batch, scores: Scores, algorithm: Algorithm) -> tuple[PerPack, PerPack]:
    """Advantages of tokens, and the critic's targets; both on the last stage."""
    count = len(batch.microbatches)
    advantages: list[Tensor | None] = [None] * count
    returns: list[Tensor | None] = [None] * count
    row = ADVANTAGES[algorithm.estimator]
    for i, rewards in enumerate(rewards_of_tokens(batch, scores, algorithm)):
        values = scores.values[i] if row.critic else None
        if row.critic and values is None:
            continue
        result = token_advantages(rewards, values, batch.microbatches[i], algorithm)
        advantages[i], returns[i] = result if row.critic else (result, None)
    return advantages, returns


def token_advantages(rewards: Tensor, values: Tensor | None, microbatch: Microbatch, algorithm: Algorithm) -> Any:
    """Advantages [labelled tokens] by the estimator, of a critic's with its targets."""
    offered = {
        "rewards": rewards,
        "values": values,
        "samples": microbatch.pack.sample,
        "gamma": algorithm.gamma,
        "gae_lambda": algorithm.gae_lambda,
    }
    return ADVANTAGES[algorithm.estimator].call(offered)


def _standardized(values: PerPack) -> PerPack:
    """The values with mean 0 and deviation 1 over all trained tokens of the batch."""
    whole = _moments(values)
    return [standardized(value, whole) if value is not None else None for value in values]


def _explained(values: PerPack, returns: PerPack) -> dict[str, float]:
    """1 - Var(return - value) / Var(return): 1 for a critic that knows, 0 for one that says the mean."""
    errors = [
        target - value if target is not None and value is not None else None
        for value, target in zip(values, returns, strict=True)
    ]
    error, whole = _moments(errors), _moments(returns)
    share = float(error[2] / whole[2]) if whole[2] > 0 else 1.0
    return {
        "train/explained_variance": 1.0 - share,
        "train/return_mean": float(whole[1]),
        "train/value_mean": float(whole[1] - error[1]),
    }


def _moments(values: PerPack) -> Tensor:
    known = [value for value in values if value is not None]
    return moments_over_ranks(moments(torch.cat(known)) if known else None)
