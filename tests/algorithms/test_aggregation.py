"""From tokens to one loss, against arithmetic done by hand."""

from __future__ import annotations

import pytest
import torch

from vime.algorithms.aggregation import Aggregation, response_sums, sample_token_weights

ALL: list[Aggregation] = ["token_mean", "sequence_mean", "constant"]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Responses of 3, 1 and 0 trained tokens.
        ("token_mean", [1 / 4, 1 / 4]),  # of 4 tokens
        ("sequence_mean", [1 / 6, 1 / 2]),  # two responses have a mean, of 3 and of 1
        ("constant", [1 / 30, 1 / 30]),  # 3 responses of up to 10 tokens
    ],
)
def test_by_hand(aggregation: Aggregation, expected: list[float]) -> None:
    weights = sample_token_weights(aggregation, torch.tensor([3, 1, 0]), longest=10)
    torch.testing.assert_close(weights[:2], torch.tensor(expected))


@pytest.mark.parametrize("aggregation", ALL)
@pytest.mark.parametrize("trained", [[0, 0], []])
def test_case_3_nothing_to_train_on(aggregation: Aggregation, trained: list[int]) -> None:
    tokens = torch.tensor(trained, dtype=torch.int64)
    weights = sample_token_weights(aggregation, tokens, longest=4)
    assert torch.isfinite(weights).all()
    assert float((weights * tokens).sum()) == 0


def test_sums_over_responses_whatever_their_numbers() -> None:
    samples = torch.tensor([7, 7, 9, 0, 0, 0])
    sums = response_sums(torch.tensor([1.0, 2, 3, 4, 5, 6]), samples)
    assert sums.tolist() == [3, 3, 3, 15, 15, 15]
    assert response_sums(torch.zeros(0), samples[:0]).tolist() == []
