"""Corrections for engines that sample with other probabilities, against arithmetic done by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vime.algorithms.aggregation import sample_sums
from vime.algorithms.importance import importance_weights, log_ratios
from vime.algorithms.masking import NonFiniteLogprob


def logs(*ratios: float) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log().float()


# Two responses: ratios 0.25 and 3 (product 0.75), 1.5 and 2.5 (product 3.75). Bounds 0.5 and 2.
RATIOS, OWNER = logs(0.25, 3.0, 1.5, 2.5), torch.tensor([0, 0, 1, 1])
OF_SAMPLE = sample_sums(RATIOS, OWNER, 2)[OWNER]


def test_truncated_by_hand() -> None:
    weights, outside = importance_weights(RATIOS, OF_SAMPLE, "truncated", 0.5, 2.0)
    torch.testing.assert_close(weights, torch.tensor([0.5, 2.0, 1.5, 2.0]))
    assert outside.tolist() == [True, True, False, True]


def test_token_mask_by_hand() -> None:
    weights, outside = importance_weights(RATIOS, OF_SAMPLE, "token_mask", 0.5, 2.0)
    torch.testing.assert_close(weights, torch.tensor([0.0, 0.0, 1.5, 0.0]))
    assert outside.tolist() == [True, True, False, True]


def test_sequence_mask_by_hand() -> None:
    weights, outside = importance_weights(RATIOS, OF_SAMPLE, "sequence_mask", 0.5, 2.0)
    torch.testing.assert_close(weights, torch.tensor([0.75, 0.75, 0.0, 0.0]))
    assert outside.tolist() == [False, False, True, True]


def test_log_ratios_of_masked_tokens_do_not_matter() -> None:
    nan = math.nan
    new = torch.tensor([-1.0, nan], requires_grad=True)
    seen = log_ratios(new, torch.tensor([-1.5, nan]), torch.tensor([1, 0]))
    assert seen.tolist() == [0.5, 0.0]
    assert not seen.requires_grad
    with pytest.raises(NonFiniteLogprob, match="rollout_logprobs is nan at token 0"):
        log_ratios(torch.tensor([-1.0]), torch.tensor([nan]), torch.tensor([1]))


def test_an_extreme_ratio_stays_finite() -> None:
    weights, _ = importance_weights(torch.tensor([500.0]), torch.tensor([500.0]), "token_mask", 0.0, 1e30)
    assert torch.isfinite(weights).all()
