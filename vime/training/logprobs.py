"""Logprobs and entropies from hidden states, vocabulary-parallel and chunk by chunk.

The logits of all tokens in float32 would be the largest tensor of a training step (16k tokens x a vocabulary of 152k x
4 bytes is 10 GB). Here the logits of at most `chunk` tokens exist at a time, in the forward pass and again in the
backward pass, which recomputes them from the saved log-normaliser.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocabulary_size: int,
    chunk: int,
    group: Group = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy of each distribution, under softmax(hidden @ weight.T / temperature).

    hidden: [tokens, width], the same on every rank of `group`.
    weight: [rows of this rank, width]; rank r holds tokens r * rows to (r + 1) * rows of the vocabulary. Rows past
        `vocabulary_size` are padding and take no part in the softmax.
    targets: int64 [tokens], global token ids.
    Returns float32 [tokens] logprobs and entropies (nats). The gradient of `hidden` is this rank's share: the sum over
    the group is the caller's (Megatron's copy_to_tensor_model_parallel_region does it).
    """
    output: tuple[Tensor, Tensor] = _Logprobs.apply(hidden, weight, targets, temperature, vocabulary_size, chunk, group)
    return output


def _all_reduce(tensor: Tensor, op: Any, group: Group) -> Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def _logits(hidden: Tensor, weight: Tensor, temperature: float, vocabulary_left: int) -> Tensor:
    """Scaled float32 logits [tokens, rows of this rank]; those of padding, past `vocabulary_left`, are -inf."""
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits /= temperature
    if vocabulary_left < logits.shape[1]:
        logits[:, max(vocabulary_left, 0) :] = float("-inf")
    return logits


def _first_token(weight: Tensor, group: Group) -> int:
    return weight.shape[0] * (dist.get_rank(group) if group is not None else 0)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        vocabulary_size: int,
        chunk: int,
        group: Group,
    ) -> tuple[Tensor, Tensor]:
        first = _first_token(weight, group)
        tokens = hidden.shape[0]
        normaliser = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        logprobs, entropies = torch.empty_like(normaliser), torch.empty_like(normaliser)
        for start in range(0, tokens, chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], weight, temperature, vocabulary_size - first)
            largest = _all_reduce(logits.amax(dim=-1), dist.ReduceOp.MAX, group)
            local = targets[rows] - first
            here = (local >= 0) & (local < weight.shape[0])
            picked = logits.gather(1, local.clamp(0, weight.shape[0] - 1).unsqueeze(1)).squeeze(1)
            picked = torch.where(here, picked - largest, torch.zeros_like(picked))
            shifted = logits.sub_(largest.unsqueeze(1))
            exponent = shifted.exp()
            total = exponent.sum(dim=-1)
            # sum of p * logit, with 0 * -inf of padding taken as 0
            weighted = exponent.mul_(shifted.clamp_(min=torch.finfo(torch.float32).min)).sum(dim=-1)
            sums = _all_reduce(torch.stack([total, weighted, picked]), dist.ReduceOp.SUM, group)
            del logits, shifted, exponent  # before the next chunk's are made
            log_sum = sums[0].log()
            logprobs[rows] = sums[2] - log_sum
            entropies[rows] = log_sum - sums[1] / sums[0]
            normaliser[rows] = largest + log_sum
        ctx.set_materialize_grads(False)  # an entropy that no loss uses has no gradient, and costs nothing
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropies)
        ctx.settings = (temperature, vocabulary_size, chunk, group)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, targets, normaliser, entropies = ctx.saved_tensors
        temperature, vocabulary_size, chunk, group = ctx.settings
        first = _first_token(weight, group)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normaliser)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], weight, temperature, vocabulary_size - first)
            log_p = logits.sub_(normaliser[rows].unsqueeze(1))
            # d logprob / d logits = onehot - p;  d entropy / d logits = -p * (log p + entropy)
            if grad_entropies is None:
                grad = log_p.exp_().mul_(-grad_logprobs[rows].unsqueeze(1))
            else:
                grad = log_p.exp()
                # In place: these are the largest tensors of a step. p comes first, because 0 * -max is 0 and stays so.
                log_p.clamp_(min=torch.finfo(torch.float32).min).add_(entropies[rows].unsqueeze(1))
                log_p.mul_(grad).mul_(grad_entropies[rows].unsqueeze(1))
                grad.mul_(grad_logprobs[rows].unsqueeze(1)).add_(log_p).neg_()
            del logits, log_p
            local = targets[rows] - first
            here = (local >= 0) & (local < weight.shape[0])
            picked = torch.where(here, grad_logprobs[rows], torch.zeros_like(grad_logprobs[rows]))
            grad.scatter_add_(1, local.clamp(0, weight.shape[0] - 1).unsqueeze(1), picked.unsqueeze(1))
            if temperature != 1.0:
                grad /= temperature
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += (grad.t() @ hidden[rows]).float()
            del grad
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None
