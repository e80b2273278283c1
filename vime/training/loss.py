"""The loss of one microbatch: a weighted sum over its trained tokens, and the metrics about it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vime.algorithms.aggregation import response_sums, weighted_sum
from vime.algorithms.importance import importance_weights, log_ratios
from vime.algorithms.kl import kl_estimate
from vime.algorithms.losses import LARGEST_LOG_RATIO, LOSSES, likelihood_loss
from vime.algorithms.masking import kept
from vime.algorithms.metrics import Metric
from vime.config import Algorithm
from vime.config.import_path import call_by_name, load_function
from vime.errors import UserError
from vime.training.batch import Microbatch
from vime.training.experience import Experience
from vime.training.metrics import MicrobatchMetrics, reduced

Metrics = dict[str, Metric]
"""By the name that they have in metrics.jsonl. To add one, add its line where its values are computed."""


def microbatch_loss(output: Tensor, experience: Experience, algorithm: Algorithm) -> tuple[Tensor, MicrobatchMetrics]:
    """The loss to differentiate, a scalar, and the metrics.

    output: float32 [2, trained tokens], logprobs and entropies of the policy.
    Raises NonFiniteLogprob when a token's logprob is NaN or infinite.
    """
    microbatch, (logprobs, entropies) = experience.microbatch, output
    weights = microbatch.loss_weights
    if algorithm.name == "sft":
        per_token, metrics = likelihood_loss(logprobs, microbatch.mask), Metrics()
    else:
        per_token, metrics = _policy(logprobs, experience, algorithm)
    total = per_token
    if experience.reference_logprobs is not None:
        kl = kl_estimate(
            logprobs,
            experience.reference_logprobs,
            algorithm.kl_estimator,
            microbatch.mask,
            algorithm.kl_clamp,
            _old_logprobs(logprobs, experience, algorithm) if algorithm.kl_unbiased else None,
        )
        if algorithm.kl_in == "loss":
            total = total + algorithm.kl_coefficient * kl
    else:
        kl = torch.zeros_like(logprobs)
    if algorithm.entropy_coefficient:
        total = total - algorithm.entropy_coefficient * entropies
    metrics |= {
        "train/loss": Metric(total, weights=weights),
        "train/pg_loss": Metric(per_token, weights=weights),
        "train/kl_loss": Metric(kl, weights=weights),
        "train/entropy_loss": Metric(entropies),
    }
    return weighted_sum(total, weights), reduced(metrics, microbatch.metric_weights)


def _policy(logprobs: Tensor, experience: Experience, algorithm: Algorithm) -> tuple[Tensor, Metrics]:
    """The policy loss [T] of each token, and the metrics about it.

    Those of the importance-sampling corrections are measured whether one is on or off: mean truncated weight, and the
    share of tokens that each kind of mask would drop.
    """
    microbatch, advantages = experience.microbatch, experience.advantages
    assert advantages is not None, "the last stage knows its advantages"
    mask, samples, fresh = microbatch.mask, microbatch.pack.sample, ~microbatch.stale
    policy_logprobs = _policy_logprobs(logprobs, experience)
    old_logprobs = _old_logprobs(logprobs, experience, algorithm)
    metrics: Metrics = {}
    if experience.teacher_logprobs is not None:
        gap = kept(experience.teacher_logprobs, mask, "teacher_logprobs") - kept(policy_logprobs, mask, "logprobs")
        advantages = advantages + algorithm.teacher_coefficient * gap
        metrics["train/opd_reverse_kl"] = Metric(-gap)
    per_token, clipped, of_loss = _loss(logprobs, old_logprobs, advantages, microbatch, algorithm)
    # The trainer's and the engine's logprobs of the same tokens.
    mismatch = log_ratios(policy_logprobs, microbatch.pack.rollout_logprobs, mask)
    of_response = response_sums(mismatch, samples)
    bounds = algorithm.importance_low, algorithm.importance_high
    truncated, outside = importance_weights(mismatch, of_response, "truncated", *bounds)
    outside_sequence = importance_weights(mismatch, of_response, "sequence_mask", *bounds)[1]
    if algorithm.importance_sampling != "off":
        # A ratio from the engine's logprob corrects for the engine by itself, within a response too.
        from_rollout = _from_rollout(microbatch, algorithm)
        own = torch.where(from_rollout, torch.zeros_like(mismatch), mismatch)
        weight, _ = importance_weights(own, response_sums(own, samples), algorithm.importance_sampling, *bounds)
        per_token = torch.where(from_rollout, per_token, per_token * weight)
    change = logprobs.detach() - old_logprobs
    ratio = change.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    metrics |= {
        "train/pg_clipfrac": Metric(clipped.float()),
        "train/ppo_kl": Metric(-change),
        "train/ois": Metric(ratio),
        "train/ratio_max": Metric(ratio, "max"),
        "train/tis": Metric(truncated),
        "train/tis_clipfrac": Metric(outside.float()),
        "train/tis_sequence_clipfrac": Metric(outside_sequence.float()),
        "train/train_rollout_kl": Metric(mismatch.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).expm1() - mismatch),
        # Only weights that sampled a token can be asked whether they agree with the engine about it.
        "train/train_rollout_logprob_abs_diff": Metric(mismatch.abs(), where=fresh),
        "train/train_rollout_logprob_abs_diff_max": Metric(mismatch.abs(), "max", where=fresh),
    }
    return per_token, of_loss | metrics


def _from_rollout(microbatch: Microbatch, algorithm: Algorithm) -> Tensor:
    """Bool [T]: whose old logprob is the engine's."""
    match algorithm.old_logprobs:
        case "auto":
            return microbatch.stale
        case "trainer":
            return torch.zeros_like(microbatch.stale)
        case "rollout":
            return torch.ones_like(microbatch.stale)


def _policy_logprobs(logprobs: Tensor, experience: Experience) -> Tensor:
    """Logprobs [T] of the policy before the step.

    With one update a batch that is the policy that is differentiated, so no other pass is needed.
    """
    return logprobs.detach() if experience.policy_logprobs is None else experience.policy_logprobs


def _old_logprobs(logprobs: Tensor, experience: Experience, algorithm: Algorithm) -> Tensor:
    """Logprobs [T] of the policy that ratios are taken from."""
    microbatch = experience.microbatch
    own = _policy_logprobs(logprobs, experience)
    return torch.where(_from_rollout(microbatch, algorithm), microbatch.pack.rollout_logprobs, own)


def _loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, microbatch: Microbatch, algorithm: Algorithm
) -> tuple[Tensor, Tensor, Metrics]:
    """The loss [T] of `algorithm.loss`, where it clipped, and metrics of its own."""
    offered = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "advantages": advantages,
        "mask": microbatch.mask,
        "rollout_logprobs": microbatch.pack.rollout_logprobs,
        "samples": microbatch.pack.sample,
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "clip_dual": algorithm.clip_dual,
    }
    path = algorithm.loss
    if path in LOSSES:
        result: Any = LOSSES[path].call(offered)
    else:
        result = call_by_name(load_function(path, "algorithm.loss"), offered, path, "algorithm.loss")
    per_token, *rest = result if isinstance(result, tuple) else (result,)
    clipped, *metrics = rest or (torch.zeros_like(microbatch.mask),)
    own: Metrics = metrics[0] if metrics else {}
    values = {"a loss": per_token, "what it clipped": clipped, **{name: one.values for name, one in own.items()}}
    for what, value in values.items():
        if not isinstance(value, Tensor) or value.shape != logprobs.shape:
            raise UserError(
                f"algorithm.loss={path} must return a tensor [{len(logprobs)}], a number for each token, as {what}"
            )
    return per_token, clipped, own
