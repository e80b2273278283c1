"""What a batch teaches: the advantage of each trained token, from rewards and from passes of the frozen models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vime.algorithms.advantages import (
    centred_rewards,
    counted_rewards,
    group_advantages,
    leave_one_out_advantages,
)
from vime.algorithms.aggregation import sample_sums
from vime.algorithms.kl import kl_estimate
from vime.algorithms.returns import discounted_sums, gae, moments, standardized, token_rewards
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

    before: logprobs of the policy. reference, teacher: of those models (a served teacher's came with the samples, on
    every stage). values: of the critic.
    """

    before: PerPack = ()
    reference: PerPack = ()
    teacher: PerPack = ()
    values: PerPack = ()


@dataclass(frozen=True)
class Experience:
    """A microbatch with what the last stage learns from: float32 [labelled tokens].

    advantages: None on other stages. before: logprobs of the policy before the step, when several updates need them.
    returns, values: the critic's targets and its values before the step. rewards: of each token, from which the critic
    makes its targets when its values come with the update.
    """

    microbatch: Microbatch
    advantages: Tensor | None = None
    before: Tensor | None = None
    reference: Tensor | None = None
    teacher: Tensor | None = None
    returns: Tensor | None = None
    values: Tensor | None = None
    rewards: Tensor | None = None


@dataclass(frozen=True)
class Experiences:
    """The experience of a batch, and what there is to say of it, the same on every rank."""

    items: list[Experience]
    metrics: dict[str, float] = field(default_factory=dict)


def gather(batch: Batch, scores: Scores, algorithm: Algorithm) -> Experiences:
    """Advantages for every microbatch. A collective over all trainer ranks.

    Raises UserError when a custom advantage function fails, ValueError when a reward is not finite.
    """
    count = len(batch.microbatches)
    returns: PerPack = [None] * count
    metrics: dict[str, float] = {}
    if algorithm.name == "sft":
        advantages: PerPack = [torch.ones_like(microbatch.weights) for microbatch in batch.microbatches]
    elif algorithm.estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        advantages, returns = _of_tokens(batch, scores, algorithm)
        if algorithm.normalizes:
            advantages = _standardized(batch, advantages)
        if algorithm.name == "ppo":
            metrics = _explained(batch, scores.values, returns)
    else:
        of_samples = _of_samples(batch, _penalties(batch, scores, algorithm), algorithm)
        advantages = [
            of_samples[microbatch.owners.cpu()].to(microbatch.weights.device) for microbatch in batch.microbatches
        ]
    none: PerPack = [None] * count
    items = [
        Experience(*parts)
        for parts in zip(
            batch.microbatches,
            advantages,
            scores.before if algorithm.minibatches > 1 else none,
            scores.reference or none,
            scores.teacher or none,
            returns,
            scores.values or none,
            strict=True,
        )
    ]
    return Experiences(items, metrics)


def _penalties(batch: Batch, scores: Scores, algorithm: Algorithm) -> PerPack:
    """The KL term that is taken from each token's reward."""
    if not algorithm.kl_of_reward:
        return [None] * len(batch.microbatches)
    return [
        algorithm.kl_coefficient
        * kl_estimate(before, reference, algorithm.kl_estimator, microbatch.weights > 0, algorithm.kl_clamp)
        if before is not None and reference is not None
        else None
        for microbatch, before, reference in zip(batch.microbatches, scores.before, scores.reference, strict=True)
    ]


def _of_samples(batch: Batch, penalties: PerPack, algorithm: Algorithm) -> Tensor:
    """Advantages [N] of whole responses, whose reward is less the sum of their tokens' penalties."""
    rewards = batch.rewards
    if algorithm.kl_of_reward:
        sums = torch.zeros(len(rewards), dtype=torch.float64)
        for microbatch, penalty in zip(batch.microbatches, penalties, strict=True):
            if penalty is not None:
                sums += sample_sums(penalty, microbatch.owners, len(rewards)).cpu()
        rewards = rewards - sum_over_ranks(sums).float().cpu()
    if algorithm.estimator == "grpo":
        return group_advantages(rewards, batch.groups, batch.sample_weights, algorithm.normalizes)
    if algorithm.estimator == "rloo":
        return leave_one_out_advantages(rewards, batch.groups, batch.sample_weights, algorithm.normalizes)
    return _custom(algorithm.estimator, rewards, batch)


def _custom(path: str, rewards: Tensor, batch: Batch) -> Tensor:
    function: Callable[..., Any] = load_function(path, "algorithm.advantage")
    offered = {
        "rewards": rewards,
        "groups": batch.groups,
        "weights": batch.sample_weights,
        "response_tokens": batch.response_tokens,
    }
    result = call_by_name(function, offered, path, "algorithm.advantage")
    if not isinstance(result, Tensor) or result.shape != rewards.shape:
        what = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise UserError(f"algorithm.advantage={path} returned {what}; it must return a tensor [{len(rewards)}]")
    counted = batch.sample_weights > 0
    strange = (~torch.isfinite(result) & counted).nonzero().flatten()
    if len(strange):
        raise UserError(f"algorithm.advantage={path} gave sample {int(strange[0])} {float(result[strange[0]])}")
    return torch.where(counted, result.detach().float(), torch.zeros_like(rewards))


def rewards_of_tokens(batch: Batch, scores: Scores, algorithm: Algorithm) -> list[Tensor]:
    """Reward float32 [labelled tokens] of each token, for each microbatch; without the KL term on earlier stages."""
    if algorithm.estimator == "reinforce_plus_plus_baseline":
        rewards = centred_rewards(batch.rewards, batch.groups, batch.sample_weights)
    else:
        rewards = counted_rewards(batch.rewards, batch.sample_weights)
    return [
        token_rewards(rewards[microbatch.owners.cpu()].to(microbatch.weights.device), microbatch.pack.sample, penalty)
        for microbatch, penalty in zip(batch.microbatches, _penalties(batch, scores, algorithm), strict=True)
    ]


def _of_tokens(batch: Batch, scores: Scores, algorithm: Algorithm) -> tuple[PerPack, PerPack]:
    """Advantages and returns of tokens, on the last stage."""
    advantages: list[Tensor | None] = []
    returns: list[Tensor | None] = []
    for i, own in enumerate(rewards_of_tokens(batch, scores, algorithm)):
        samples = batch.microbatches[i].pack.sample
        if algorithm.estimator != "gae":
            sums = discounted_sums(own, samples, algorithm.gamma)
            advantages.append(sums)
            returns.append(sums)
            continue
        value = scores.values[i]
        both = (None, None) if value is None else gae(own, value, samples, algorithm.gamma, algorithm.gae_lambda)
        advantages.append(both[0])
        returns.append(both[1])
    return advantages, returns


def _standardized(batch: Batch, values: PerPack) -> PerPack:
    """The values with mean 0 and deviation 1 over all trained tokens of the batch."""
    whole = _moments(batch, values)
    return [standardized(value, whole) if value is not None else None for value in values]


def _explained(batch: Batch, values: PerPack, returns: PerPack) -> dict[str, float]:
    """1 - Var(return - value) / Var(return): 1 for a critic that knows, 0 for one that says the mean."""
    errors = [
        target - value if target is not None and value is not None else None
        for value, target in zip(values, returns, strict=True)
    ]
    error, whole = _moments(batch, errors), _moments(batch, returns)
    share = float(error[2] / whole[2]) if whole[2] > 0 else 1.0
    return {
        "train/explained_variance": 1.0 - share,
        "train/return_mean": float(whole[1]),
        "train/value_mean": float(whole[1] - error[1]),
    }


def _moments(batch: Batch, values: PerPack) -> Tensor:
    kept = [
        (value, microbatch.weights > 0)
        for microbatch, value in zip(batch.microbatches, values, strict=True)
        if value is not None
    ]
    mine = moments(torch.cat([v for v, _ in kept]), torch.cat([k for _, k in kept])) if kept else None
    return moments_over_ranks(mine)
