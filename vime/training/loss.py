"""The loss of one microbatch: a weighted sum over its trained tokens, and the sums that the step's metrics need."""

from __future__ import annotations

from enum import IntEnum, auto

import torch
from torch import Tensor

from vime.algorithms.aggregation import weighted_sum
from vime.algorithms.kl import kl_estimate
from vime.algorithms.losses import likelihood_loss, policy_loss
from vime.config import Algorithm
from vime.training.batch import Microbatch


class Sum(IntEnum):
    """Places of the sums in a microbatch's result. Each is weighted, so that adding up all ranks gives the mean."""

    LOSS = 0
    POLICY = auto()
    KL = auto()
    ENTROPY = auto()
    CLIPPED = auto()
    LOGPROB_DIFFERENCE = auto()


def microbatch_loss(
    output: Tensor, microbatch: Microbatch, algorithm: Algorithm, reference: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The loss to differentiate, a scalar, and float32 [len(Sum)] sums without gradient.

    output: float32 [2, labelled tokens], logprobs and entropies of the policy.
    reference: float32 [labelled tokens], logprobs under the initial policy, when the KL term is on.
    Raises NonFiniteLogprob when a trained token's logprob is NaN or infinite.
    """
    logprobs, entropies = output[0], output[1]
    weights, rollout = microbatch.weights, microbatch.pack.rollout_logprobs
    current = logprobs.detach()
    trained = weights > 0
    if algorithm.name == "sft":
        per_token, clipped = likelihood_loss(logprobs, trained), torch.zeros_like(trained)
    else:
        # On-policy tokens were sampled from the policy that is trained, so their ratio is 1 and no other pass is
        # needed; for stale ones the engine's logprob is that of the policy that sampled them.
        old = torch.where(microbatch.stale, rollout, current)
        per_token, clipped = policy_loss(
            logprobs, old, microbatch.advantages, trained, algorithm.clip_low, algorithm.clip_high
        )
    policy = weighted_sum(per_token, weights)
    loss = policy
    kl = torch.zeros_like(policy)
    if reference is not None:
        kl = weighted_sum(kl_estimate(logprobs, reference, algorithm.kl_estimator, trained), weights)
        loss = loss + algorithm.kl_coefficient * kl
    entropy = weighted_sum(entropies, weights)
    if algorithm.entropy_coefficient:
        loss = loss - algorithm.entropy_coefficient * entropy
    difference = weighted_sum((current - rollout).abs(), weights)
    sums = torch.stack([loss, policy, kl, entropy, weighted_sum(clipped.float(), weights), difference]).detach()
    return loss, sums
