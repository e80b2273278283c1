"""From tokens to one loss, against arithmetic done by hand, and the same for any division."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algorithms.aggregation import Aggregation, sample_token_weights

ALL: list[Aggregation] = ["token_mean", "sequence_mean", "constant"]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Responses of 3, 1, 0 and 2 trained tokens; the last only fills up the batch (weight 0).
        ("token_mean", [1 / 4, 1 / 4, 1 / 4, 0]),  # of 4 tokens
        ("sequence_mean", [1 / 6, 1 / 2, 0, 0]),  # two responses have a mean, of 3 and of 1
        ("constant", [1 / 30, 1 / 30, 1 / 30, 0]),  # 3 responses of up to 10 tokens
    ],
)
def test_by_hand(aggregation: Aggregation, expected: list[float]) -> None:
    weights = sample_token_weights(
        aggregation, torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([3, 1, 0, 2]), longest=10
    )
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("aggregation", ALL)
def test_case_3_nothing_to_train_on(aggregation: Aggregation) -> None:
    for samples, trained in ((torch.zeros(2), torch.tensor([1, 2])), (torch.ones(2), torch.tensor([0, 0]))):
        weights = sample_token_weights(aggregation, samples, trained, longest=4)
        assert torch.isfinite(weights).all()
        assert float((weights * trained).sum()) == 0


@pytest.mark.parametrize("aggregation", ALL)
@given(trained=st.lists(st.integers(0, 50), min_size=1, max_size=12), padding=st.integers(0, 5))
def test_case_5_padding_changes_nothing(aggregation: Aggregation, trained: list[int], padding: int) -> None:
    own = sample_token_weights(aggregation, torch.ones(len(trained)), torch.tensor(trained), longest=64)
    more = sample_token_weights(
        aggregation,
        torch.tensor([1.0] * len(trained) + [0.0] * padding),
        torch.tensor(trained + [7] * padding),
        longest=64,
    )
    assert torch.equal(more[: len(trained)], own)
    assert (more[len(trained) :] == 0).all()
    if aggregation != "constant" and sum(trained):
        assert float((own.double() * torch.tensor(trained)).sum()) == pytest.approx(1.0, abs=1e-5)
