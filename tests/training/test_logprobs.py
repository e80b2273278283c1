"""Chunked, vocabulary-parallel logprobs and entropies against the plain computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training.ranks import Ranks
from vime.training.logprobs import vocab_parallel_logprobs

VOCABULARY, PADDED, WIDTH, TOKENS = 11, 12, 6, 9


def _data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(PADDED, WIDTH, generator=generator) * 2
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def _plain(temperature: float, with_entropy: bool) -> list[torch.Tensor]:
    hidden, weight, targets = _data()
    hidden.requires_grad_()
    weight.requires_grad_()
    log_p = torch.log_softmax((hidden @ weight.t())[:, :VOCABULARY] / temperature, dim=-1)
    logprobs, entropies = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (_loss(logprobs, entropies) if with_entropy else _loss(logprobs, None)).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [logprobs.detach(), entropies.detach(), hidden.grad, weight.grad]


def _loss(logprobs: torch.Tensor, entropies: torch.Tensor | None) -> torch.Tensor:
    scale = torch.arange(1, TOKENS + 1).float()
    loss = (logprobs * scale).sum()
    return loss if entropies is None else loss - (entropies * scale.flip(0)).sum()


def _parallel(
    rank: int, store: Any, world_size: int, temperature: float, chunk: int, with_entropy: bool
) -> list[torch.Tensor]:
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    hidden, weight, targets = _data()
    hidden.requires_grad_()
    local = weight.chunk(world_size)[rank].clone().requires_grad_()
    logprobs, entropies = vocab_parallel_logprobs(
        hidden,
        local,
        targets,
        temperature=temperature,
        vocabulary_size=VOCABULARY,
        chunk=chunk,
        group=torch.distributed.group.WORLD,
    )
    _loss(logprobs, entropies if with_entropy else None).backward()
    assert hidden.grad is not None
    assert local.grad is not None
    torch.distributed.all_reduce(hidden.grad)
    grads = [torch.empty_like(local.grad) for _ in range(world_size)]
    torch.distributed.all_gather(grads, local.grad)
    return [logprobs.detach(), entropies.detach(), hidden.grad, torch.cat(grads)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize(("temperature", "with_entropy"), [(1.0, True), (0.6, True), (0.6, False)])
def test_equal_to_the_plain_computation(
    ranks: Ranks, world_size: int, chunk: int, temperature: float, with_entropy: bool
) -> None:
    expected = _plain(temperature, with_entropy)
    for result in ranks.run(world_size, _parallel, temperature, chunk, with_entropy):
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_the_case_of_scaled_logits() -> None:
    # logits [1, 0, -1, -2] at temperature 0.6: exp of [0, -5/3, -10/3, -5] sums to 1.231288, so the first word has
    # logprob -ln 1.231288 = -0.208060 and the last -5.208060
    weight = torch.tensor([[1.0], [0.0], [-1.0], [-2.0]])
    logprobs, _ = vocab_parallel_logprobs(
        torch.ones(2, 1), weight, torch.tensor([0, 3]), temperature=0.6, vocabulary_size=4, chunk=8
    )
    torch.testing.assert_close(logprobs, torch.tensor([-0.208060, -5.208060]), atol=1e-6, rtol=0)


def test_no_tokens() -> None:
    hidden = torch.empty(0, WIDTH, requires_grad=True)
    logprobs, entropies = vocab_parallel_logprobs(
        hidden, torch.randn(4, WIDTH), torch.empty(0, dtype=torch.int64), temperature=1.0, vocabulary_size=4, chunk=8
    )
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
