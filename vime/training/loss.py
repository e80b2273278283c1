"""The loss of one microbatch: a weighted sum over its trained tokens, and the sums that the step's metrics need."""

from __future__ import annotations

from enum import IntEnum, auto

import torch
from torch import Tensor

from vime.algorithms.aggregation import sample_sums, weighted_sum
from vime.algorithms.importance import importance_weights, log_ratios
from vime.algorithms.kl import kl_estimate
from vime.algorithms.losses import LARGEST_LOG_RATIO, cispo_loss, likelihood_loss, policy_loss, sequence_policy_loss
from vime.algorithms.masking import kept
from vime.config import Algorithm
from vime.config.import_path import call_by_name, load_function
from vime.errors import UserError
from vime.training.batch import Microbatch
from vime.training.experience import Experience


class Sum(IntEnum):
    """Places of the sums in a microbatch's result. Each is weighted, so that adding up all ranks gives the mean."""

    LOSS = 0
    POLICY = auto()
    KL = auto()
    ENTROPY = auto()
    CLIPPED = auto()
    LOGPROB_DIFFERENCE = auto()
    FRESH = auto()
    OLD_KL = auto()
    RATIO = auto()
    MISMATCH_KL = auto()
    TRUNCATED = auto()
    OUTSIDE = auto()
    OUTSIDE_SEQUENCE = auto()
    TEACHER_KL = auto()


METRICS = {
    "train/loss": Sum.LOSS,
    "train/pg_loss": Sum.POLICY,
    "train/kl_loss": Sum.KL,
    "train/entropy_loss": Sum.ENTROPY,
    "train/pg_clipfrac": Sum.CLIPPED,
}
ROLLOUT_METRICS = {
    "train/train_rollout_kl": Sum.MISMATCH_KL,
    "train/ppo_kl": Sum.OLD_KL,
    "train/ois": Sum.RATIO,
    "train/tis": Sum.TRUNCATED,
    "train/tis_clipfrac": Sum.OUTSIDE,
    "train/tis_sequence_clipfrac": Sum.OUTSIDE_SEQUENCE,
}
"""Metrics that need rollout logprobs, which demonstrations have not. Those of the importance-sampling corrections are
measured whether one is on or off: mean truncated weight, and the share of tokens that each kind of mask would drop."""


def microbatch_loss(output: Tensor, experience: Experience, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """The loss to differentiate, a scalar, and float32 [len(Sum)] sums without gradient.

    output: float32 [2, labelled tokens], logprobs and entropies of the policy.
    Raises NonFiniteLogprob when a trained token's logprob is NaN or infinite.
    """
    microbatch, (logprobs, entropies) = experience.microbatch, output
    weights, shares, trained = microbatch.weights, microbatch.shares, microbatch.weights > 0
    sums: dict[Sum, Tensor] = {}
    if algorithm.name == "sft":
        per_token = likelihood_loss(logprobs, trained)
    else:
        per_token, sums = _policy(logprobs, experience, algorithm)
    policy = weighted_sum(per_token, weights)
    loss = policy
    if experience.reference is not None:
        estimates = kl_estimate(
            logprobs,
            experience.reference,
            algorithm.kl_estimator,
            trained,
            algorithm.kl_clamp,
            _old(logprobs, experience, algorithm) if algorithm.kl_unbiased else None,
        )
        kl = weighted_sum(estimates, weights)
        sums[Sum.KL] = kl
        if algorithm.kl_in == "loss":
            loss = loss + algorithm.kl_coefficient * kl
    if algorithm.entropy_coefficient:
        loss = loss - algorithm.entropy_coefficient * weighted_sum(entropies, weights)
    sums |= {Sum.LOSS: loss, Sum.POLICY: policy, Sum.ENTROPY: weighted_sum(entropies, shares)}
    none = torch.zeros_like(policy)
    return loss, torch.stack([sums.get(name, none) for name in Sum]).detach()


def _policy(logprobs: Tensor, experience: Experience, algorithm: Algorithm) -> tuple[Tensor, dict[Sum, Tensor]]:
    """The policy loss [T] of each token, and the sums about it."""
    microbatch, advantages = experience.microbatch, experience.advantages
    assert advantages is not None, "the last stage knows its advantages"
    rollout, shares, trained = microbatch.pack.rollout_logprobs, microbatch.shares, microbatch.weights > 0
    before, old = _before(logprobs, experience), _old(logprobs, experience, algorithm)
    from_rollout = _from_rollout(microbatch, algorithm)
    sums: dict[Sum, Tensor] = {}
    if experience.teacher is not None:
        gap = kept(experience.teacher, trained, "teacher_logprobs") - kept(before, trained, "logprobs")
        advantages = advantages + algorithm.teacher_coefficient * gap
        sums[Sum.TEACHER_KL] = weighted_sum(-gap, shares)
    per_token, clipped = _loss(logprobs, old, advantages, experience, algorithm)
    mismatch = log_ratios(before, rollout, trained)
    of_sample = _of_sample(mismatch, microbatch)
    bounds = algorithm.importance_low, algorithm.importance_high
    truncated, outside = importance_weights(mismatch, of_sample, "truncated", *bounds)
    outside_sequence = importance_weights(mismatch, of_sample, "sequence_mask", *bounds)[1]
    if algorithm.importance_sampling != "off":
        # A ratio from the engine's logprob corrects for the engine by itself, within a response too.
        own = torch.where(from_rollout, torch.zeros_like(mismatch), mismatch)
        weight, _ = importance_weights(own, _of_sample(own, microbatch), algorithm.importance_sampling, *bounds)
        per_token = torch.where(from_rollout, per_token, per_token * weight)
    change = torch.where(trained, logprobs.detach() - old, torch.zeros_like(old))
    values = {
        Sum.CLIPPED: clipped.float(),
        # Only weights that sampled a token can be asked whether they agree with the engine about it.
        Sum.LOGPROB_DIFFERENCE: mismatch.abs() * ~microbatch.stale,
        Sum.FRESH: (~microbatch.stale).float(),
        Sum.MISMATCH_KL: mismatch.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).expm1() - mismatch,
        Sum.OLD_KL: -change,
        Sum.RATIO: change.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp(),
        Sum.TRUNCATED: truncated,
        Sum.OUTSIDE: outside.float(),
        Sum.OUTSIDE_SEQUENCE: outside_sequence.float(),
    }
    return per_token, sums | {name: weighted_sum(value, shares) for name, value in values.items()}


def _from_rollout(microbatch: Microbatch, algorithm: Algorithm) -> Tensor:
    """Bool [T]: whose old logprob is the engine's."""
    match algorithm.old_logprobs:
        case "auto":
            return microbatch.stale
        case "trainer":
            return torch.zeros_like(microbatch.stale)
        case "rollout":
            return torch.ones_like(microbatch.stale)


def _before(logprobs: Tensor, experience: Experience) -> Tensor:
    """Logprobs [T] of the policy before the step.

    With one update a batch that is the policy that is differentiated, so no other pass is needed.
    """
    return logprobs.detach() if experience.before is None else experience.before


def _old(logprobs: Tensor, experience: Experience, algorithm: Algorithm) -> Tensor:
    """Logprobs [T] of the policy that ratios are taken from."""
    microbatch = experience.microbatch
    rollout = microbatch.pack.rollout_logprobs
    return torch.where(_from_rollout(microbatch, algorithm), rollout, _before(logprobs, experience))


def _loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, experience: Experience, algorithm: Algorithm
) -> tuple[Tensor, Tensor]:
    microbatch = experience.microbatch
    trained = microbatch.weights > 0
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.loss:
        case "clip":
            return policy_loss(logprobs, old, advantages, trained, low, high, algorithm.clip_dual)
        case "cispo":
            return cispo_loss(logprobs, old, advantages, trained, low, high)
        case "gspo":
            change = log_ratios(logprobs, old, trained)
            count = _of_sample(trained.float(), microbatch).clamp(min=1)
            return sequence_policy_loss(
                logprobs, old, advantages, trained, _of_sample(change, microbatch) / count, low, high
            )
    offered = {
        "logprobs": torch.where(trained, logprobs, torch.zeros_like(logprobs)),
        "old_logprobs": torch.where(trained, old, torch.zeros_like(old)),
        "advantages": advantages,
        "mask": trained,
        "rollout_logprobs": microbatch.pack.rollout_logprobs,
        "samples": microbatch.pack.sample,
    }
    path = algorithm.loss
    result = call_by_name(load_function(path, "algorithm.loss"), offered, path, "algorithm.loss")
    per_token, clipped = result if isinstance(result, tuple) else (result, torch.zeros_like(trained))
    if not isinstance(per_token, Tensor) or per_token.shape != logprobs.shape:
        raise UserError(f"algorithm.loss={path} must return a tensor [{len(logprobs)}], a loss for each token")
    return torch.where(trained, per_token, torch.zeros_like(per_token)), clipped


def _of_sample(values: Tensor, microbatch: Microbatch) -> Tensor:
    """[T]: the sum of the values over the token's response. A response lies in one pack."""
    return sample_sums(values, microbatch.pack.sample, len(microbatch.samples))[microbatch.pack.sample]
