"""Per-token losses, KL estimates and their sum against arithmetic done by hand; masked tokens that must not matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vime.algorithms.aggregation import sample_token_weights, weighted_sum
from vime.algorithms.kl import kl_estimate
from vime.algorithms.losses import cispo_loss, likelihood_loss, policy_loss, sequence_policy_loss, value_loss
from vime.algorithms.masking import NonFiniteLogprob

NAN, INF = math.nan, math.inf


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def logs(*ratios: float) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log().float()


def token_weights(total: float, mask: Tensor) -> Tensor:
    """Weights of the mean over `total` trained tokens, 0 outside the mask."""
    return mask.float() * sample_token_weights("token_mean", torch.tensor([total]), 1)[0]


def test_policy_loss_by_hand() -> None:
    # Ratio, advantage -> -min(ratio * A, clip(ratio, 0.8, 1.28) * A); the clip acts where it made the minimum smaller.
    #  1.0,  2 -> -2                          free
    #  1.5,  2 -> -min(3.0, 2.56) = -2.56     clipped above
    #  0.5,  2 -> -min(1.0, 1.6)  = -1.0      free: a fall that should be undone
    #  1.5, -2 -> -min(-3.0, -2.56) = 3.0     free: a rise that should be undone
    #  0.5, -2 -> -min(-1.0, -1.6) = 1.6      clipped below
    #  1.2,  2 -> -2.4                        free, inside the upper bound only because it is 0.28
    ratios, advantages = (1.0, 1.5, 0.5, 1.5, 0.5, 1.2), f32(2, 2, 2, -2, -2, 2)
    new = logs(*ratios).requires_grad_()
    loss, clipped = policy_loss(new, torch.zeros(6), advantages, torch.ones(6), 0.2, 0.28)
    torch.testing.assert_close(loss, f32(-2, -2.56, -1.0, 3.0, 1.6, -2.4), atol=1e-6, rtol=1e-6)
    assert clipped.tolist() == [False, True, False, False, True, False]
    loss.sum().backward()
    # d/dlogp of -ratio * A is -ratio * A where free, 0 where clipped.
    torch.testing.assert_close(new.grad, f32(-2, 0, -1.0, 3.0, 0, -2.4), atol=1e-6, rtol=1e-6)


def test_dual_clip_by_hand() -> None:
    # With a bound of 3: ratio 5, A -2 -> 10, capped at 3 * 2 = 6; ratio 2, A -2 -> 4, free; ratio 5, A 2 -> -2.56, the
    # upper clip, as without it.
    new = logs(5, 2, 5).requires_grad_()
    loss, clipped = policy_loss(new, torch.zeros(3), f32(-2, -2, 2), torch.ones(3), 0.2, 0.28, clip_dual=3.0)
    torch.testing.assert_close(loss, f32(6, 4, -2.56), atol=1e-5, rtol=1e-6)
    assert clipped.tolist() == [True, False, True]
    loss.sum().backward()
    torch.testing.assert_close(new.grad, f32(0, 4, 0), atol=1e-5, rtol=1e-6)


def test_gspo_by_hand() -> None:
    # Response 0: ratios 2 and 8, log-mean exp((ln 2 + ln 8) / 2) = 4; response 1: ratio 1.1.
    # A 1 and bounds 0.5, 4.5 -> -4 a token, free; A -1, upper bound 1.05: the minimum is the free one -> 1.1.
    owner, new = torch.tensor([0, 0, 1]), logs(2, 8, 1.1).requires_grad_()
    old, advantages, mask = torch.zeros(3), f32(1, 1, -1), torch.ones(3)
    loss, clipped = sequence_policy_loss(new, old, advantages, mask, owner, 0.5, 3.5)
    torch.testing.assert_close(loss, f32(-4, -4, 1.1), atol=1e-5, rtol=1e-6)
    assert not clipped.any()
    # The mean over responses of each one's mean: d/dlogp is -s * A / length / 2 for each token.
    weighted_sum(loss, f32(0.25, 0.25, 0.5)).backward()
    torch.testing.assert_close(new.grad, f32(-1, -1, 0.55), atol=1e-5, rtol=1e-6)
    # Upper bound 3.5: response 0 is clipped as a whole.
    loss, clipped = sequence_policy_loss(new, old, advantages, mask, owner, 0.5, 2.5)
    torch.testing.assert_close(loss, f32(-3.5, -3.5, 1.1), atol=1e-5, rtol=1e-6)
    assert clipped.tolist() == [True, True, False]


def test_cispo_by_hand() -> None:
    # Ratios 0.5, 1, 4; bounds 0.8 and 2: weights 0.8, 1, 2. log p = ratio's log, since p_old = 1. A = 1, 1, -1.
    new = logs(0.5, 1, 4).requires_grad_()
    loss, clipped = cispo_loss(new, torch.zeros(3), f32(1, 1, -1), torch.ones(3), 0.2, 1.0)
    torch.testing.assert_close(loss, f32(-0.8 * math.log(0.5), 0, 2 * math.log(4)), atol=1e-5, rtol=1e-6)
    assert clipped.tolist() == [True, False, True]
    loss.sum().backward()
    torch.testing.assert_close(new.grad, f32(-0.8, -1, 2), atol=1e-5, rtol=1e-6)


def test_value_loss_by_hand() -> None:
    # Old 0, clip 0.2. V 0.5, R 1: free 0.25, bounded (0.2 - 1)**2 = 0.64, the larger: 0.32, no gradient.
    # V 0.1, R 1: (0.1 - 1)**2 / 2 = 0.405, gradient V - R = -0.9. V 0.5, R 0: free 0.25 > 0.04: 0.125, gradient 0.5.
    values = f32(0.5, 0.1, 0.5).requires_grad_()
    loss, clipped = value_loss(values, torch.zeros(3), f32(1, 1, 0), torch.ones(3), 0.2)
    torch.testing.assert_close(loss, f32(0.32, 0.405, 0.125), atol=1e-6, rtol=1e-6)
    assert clipped.tolist() == [True, False, False]
    loss.sum().backward()
    torch.testing.assert_close(values.grad, f32(0, -0.9, 0.5), atol=1e-6, rtol=1e-6)


def test_a_ratio_of_one_is_the_policy_gradient() -> None:
    new = f32(-0.5, -2.0).requires_grad_()
    loss, clipped = policy_loss(new, new.detach(), f32(1.5, -0.5), torch.ones(2), 0.2, 0.28)
    loss.sum().backward()
    assert loss.tolist() == [-1.5, 0.5]
    assert new.grad is not None
    assert new.grad.tolist() == [-1.5, 0.5]
    assert not clipped.any()


def test_only_the_new_logprobs_get_a_gradient() -> None:
    new, old, advantage = (f32(-1.0).requires_grad_() for _ in range(3))
    policy_loss(new, old, advantage, torch.ones(1), 0.2, 0.28)[0].sum().backward()
    kl_estimate(new, old, "k3", torch.ones(1)).sum().backward()
    assert new.grad is not None
    assert old.grad is None
    assert advantage.grad is None


def test_an_extreme_ratio_stays_finite() -> None:
    new = f32(0.0, 0.0, -500.0, -500.0).requires_grad_()
    old = f32(-500.0, -500.0, 0.0, 0.0)
    loss, _ = policy_loss(new, old, f32(1, -1, 1, -1), torch.ones(4), 0.2, 0.28)
    kl = kl_estimate(new, old, "k3", torch.ones(4))
    (loss.sum() + kl.sum()).backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(kl).all()
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()
    assert loss[0].item() == pytest.approx(-1.28)


def test_kl_by_hand() -> None:
    # log p = ln 0.5, log p_ref = ln 0.25: d = ln 0.5 = -0.693147.
    # k1 = 0.693147; k2 = 0.693147**2 / 2 = 0.240227; k3 = 0.5 - 1 + 0.693147 = 0.193147.
    new, reference, keep = logs(0.5), logs(0.25), torch.ones(1)
    assert kl_estimate(new, reference, "k1", keep).item() == pytest.approx(0.693147, abs=1e-6)
    assert kl_estimate(new, reference, "k2", keep).item() == pytest.approx(0.240227, abs=1e-6)
    assert kl_estimate(new, reference, "k3", keep).item() == pytest.approx(0.193147, abs=1e-6)
    # Gradients with respect to log p: k1 1, k2 -d = 0.693147, k3 1 - exp(d) = 0.5.
    estimators: tuple[tuple[Literal["k1", "k2", "k3"], float], ...] = (("k1", 1.0), ("k2", 0.693147), ("k3", 0.5))
    for estimator, slope in estimators:
        leaf = new.clone().requires_grad_()
        kl_estimate(leaf, reference, estimator, keep).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.item() == pytest.approx(slope, abs=1e-6)


def test_k1_and_k3_are_unbiased_and_k2_s_gradient_is() -> None:
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, 0.2], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    exact = (logp.exp() * (logp - reference)).sum()
    p, keep = logp.exp().detach(), torch.ones(3)
    for estimator in ("k1", "k3"):
        assert (p * kl_estimate(logp, reference, estimator, keep)).sum().item() == pytest.approx(exact.item())
    wanted = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    seen = torch.autograd.grad((p * kl_estimate(logp, reference, "k2", keep)).sum(), logits)[0]
    torch.testing.assert_close(seen, wanted)


def test_a_clamped_estimate_has_no_gradient_beyond() -> None:
    new = f32(-1.0, -3.0).requires_grad_()
    estimate = kl_estimate(new, f32(-0.5, 0.0), "k1", torch.ones(2), clamp=2.0)
    assert estimate.tolist() == [-0.5, -2.0]
    estimate.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [1.0, 0.0]


def test_a_clamped_unbiased_estimate_has_no_gradient_beyond_either() -> None:
    # Ratios e**0.5 to p_old. k1 0.5 is free: e**0.5 * 0.5, and by log p e**0.5 * (1 + 0.5). k1 -3 is clamped to -2.
    new = f32(-1.0, -3.0).requires_grad_()
    estimate = kl_estimate(new, f32(-1.5, 0.0), "k1", torch.ones(2), clamp=2.0, old_logprobs=new.detach() - 0.5)
    grown = math.exp(0.5)
    torch.testing.assert_close(estimate, f32(0.5 * grown, -2.0 * grown))
    estimate.sum().backward()
    torch.testing.assert_close(new.grad, f32(1.5 * grown, 0.0))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_an_unbiased_estimate_has_the_divergence_s_gradient(estimator: Literal["k1", "k2", "k3"]) -> None:
    # Sampled from an older policy: the sum over all words of p_old * estimate is exact.
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, 0.2], dtype=torch.float64).log_softmax(0)
    old = torch.tensor([0.5, 0.1, -0.4], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    wanted = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)[0]
    estimate = kl_estimate(logp, reference, estimator, torch.ones(3), old_logprobs=old)
    seen = torch.autograd.grad((old.exp() * estimate).sum(), logits)[0]
    if estimator == "k2":  # which is biased itself
        assert not torch.allclose(seen, wanted)
    else:
        torch.testing.assert_close(seen, wanted)


def test_k3_keeps_its_digits_near_zero() -> None:
    # d = 1e-3: exp(d) - 1 - d = 5.0017e-7, which float32's exp(d) - 1 would give to one digit.
    assert kl_estimate(f32(0.0), f32(1e-3), "k3", torch.ones(1)).item() == pytest.approx(5.0017e-7, rel=1e-3)


def test_likelihood_by_hand() -> None:
    leaf = f32(-0.5, -2.0, NAN).requires_grad_()
    loss = likelihood_loss(leaf, f32(1, 0, 0))
    loss.sum().backward()
    assert loss.tolist() == [0.5, 0, 0]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [-1, 0, 0]


Functions = dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]
FUNCTIONS: Functions = {
    "policy": lambda new, old, advantages, mask: policy_loss(new, old, advantages, mask, 0.2, 0.28)[0],
    "dual": lambda new, old, advantages, mask: policy_loss(new, old, advantages, mask, 0.2, 0.28, 3.0)[0],
    "gspo": lambda new, old, advantages, mask: sequence_policy_loss(
        new, old, advantages, mask, torch.zeros(len(new), dtype=torch.int64), 0.2, 0.28
    )[0],
    "cispo": lambda new, old, advantages, mask: cispo_loss(new, old, advantages, mask, 0.2, 0.28)[0],
    "k1": lambda new, old, advantages, mask: kl_estimate(new, old, "k1", mask),
    "k2": lambda new, old, advantages, mask: kl_estimate(new, old, "k2", mask),
    "k3": lambda new, old, advantages, mask: kl_estimate(new, old, "k3", mask),
    "likelihood": lambda new, old, advantages, mask: likelihood_loss(new, mask),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8])
def test_case_3_what_a_masked_token_holds_does_not_matter(name: str, bad: float, dtype: torch.dtype) -> None:
    new = f32(-0.3, bad, -0.7, bad).requires_grad_()
    old, advantages = f32(0, bad, -0.6, -1), f32(1, bad, -1, 2)
    mask = torch.tensor([1, 0, 1, 0], dtype=dtype)
    losses = FUNCTIONS[name](new, old, advantages, mask)
    total = weighted_sum(losses, token_weights(2, mask))
    total.backward()
    assert torch.isfinite(losses).all()
    assert losses[[1, 3]].tolist() == [0, 0]
    assert new.grad is not None
    assert new.grad[[1, 3]].tolist() == [0, 0]
    kept = f32(-0.3, -0.7).requires_grad_()
    alone = weighted_sum(
        FUNCTIONS[name](kept, f32(0, -0.6), f32(1, -1), torch.ones(2)), token_weights(2, torch.ones(2))
    )
    alone.backward()
    assert total.item() == alone.item()
    torch.testing.assert_close(new.grad[[0, 2]], kept.grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_case_3_a_mask_of_zeros(name: str) -> None:
    new, mask = f32(NAN, -1).requires_grad_(), torch.zeros(2)
    total = weighted_sum(FUNCTIONS[name](new, f32(NAN, 0), f32(1, NAN), mask), token_weights(0, mask))
    total.backward()
    assert total.item() == 0
    assert new.grad is not None
    assert new.grad.tolist() == [0, 0]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_case_3_an_unmasked_nan_is_named(name: str, bad: float) -> None:
    with pytest.raises(NonFiniteLogprob, match=r"^logprobs is .* at token 2, which is trained on$") as caught:
        FUNCTIONS[name](f32(0, bad, bad), f32(0, 0, 0), f32(1, 1, 1), f32(1, 0, 1))
    assert caught.value.index == 2


def test_case_3_an_unmasked_nan_of_the_old_policy_is_named() -> None:
    with pytest.raises(NonFiniteLogprob, match="old_logprobs is nan at token 0"):
        policy_loss(f32(0, 0), f32(NAN, 0), f32(1, 1), f32(1, 0), 0.2, 0.28)
    with pytest.raises(NonFiniteLogprob, match="reference_logprobs is nan at token 1"):
        kl_estimate(f32(0, 0), f32(0, NAN), "k3", f32(1, 1))


def test_case_5_three_samples_on_two_ranks() -> None:
    # Token losses 1 2 | 3 4 5 | 6 of three samples; mean 21 / 6 = 3.5. Rank 0 has the first two, rank 1 the third.
    rank_0 = weighted_sum(f32(1, 2, 3, 4, 5), token_weights(6, torch.ones(5)))
    rank_1 = weighted_sum(f32(6), token_weights(6, torch.ones(1)))
    assert (rank_0 + rank_1).item() == pytest.approx(3.5)


@given(
    masks=st.lists(st.lists(st.booleans(), min_size=0, max_size=12), min_size=1, max_size=12),
    parts=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_any_split_gives_the_same_loss_and_gradient(masks: list[list[bool]], parts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(parts, (len(masks),), generator=generator).tolist()
    samples = []
    for mask in masks:
        new = torch.randn(len(mask), generator=generator, dtype=torch.float64)
        old, advantages = (torch.randn(len(mask), generator=generator, dtype=torch.float64) for _ in range(2))
        samples.append((new, old, advantages, torch.tensor(mask, dtype=torch.float64)))
    total = float(sum(mask.sum() for *_, mask in samples))

    def loss_of(chosen: list[int], leaves: list[Tensor]) -> Tensor:
        new, old, advantages, mask = (
            torch.cat([leaves[i] if part == 0 else samples[i][part] for i in chosen]) for part in range(4)
        )
        weights = token_weights(total, mask)
        policy = policy_loss(new, old, advantages, mask, 0.2, 0.28)[0]
        return weighted_sum(policy + 0.1 * kl_estimate(new, old, "k3", mask), weights)

    whole = [sample[0].clone().requires_grad_() for sample in samples]
    loss_of(list(range(len(samples))), whole).backward()
    split = [sample[0].clone().requires_grad_() for sample in samples]
    ranks = [[i for i, o in enumerate(owner) if o == rank] for rank in range(parts)]
    parted = [loss_of(chosen, split) for chosen in ranks if chosen]
    torch.stack(parted).sum().backward()
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-9, rtol=1e-6)
    by_hand = sum(float(loss_of([i], whole).detach()) for i in range(len(samples)))
    assert float(torch.stack(parted).sum().detach()) == pytest.approx(by_hand, abs=1e-6)
