"""The division of samples over ranks and microbatches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.training.balance import divide

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 8), st.integers(50, 200))
def test_every_sample_is_trained_once_within_the_limit(lengths: list[int], ranks: int, limit: int) -> None:
    shares = divide(lengths, ranks, limit)
    assert len(shares) == ranks
    assert len({len(microbatches) for microbatches in shares}) == 1
    assert sorted(i for microbatches in shares for part in microbatches for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= limit for microbatches in shares for part in microbatches)


@given(LENGTHS, st.integers(1, 8))
def test_ranks_are_balanced_by_tokens(lengths: list[int], ranks: int) -> None:
    loads = [sum(lengths[i] for part in microbatches for i in part) for microbatches in divide(lengths, ranks, 10_000)]
    # longest-first greedy: the largest load exceeds the mean by less than one sample
    assert max(loads) <= sum(lengths) / ranks + max(lengths)


def test_hand_computed() -> None:
    # longest first onto two ranks: 9 | 8, then 5 joins 8 (13), 4 joins 9 (13), 1 joins the first of equals
    assert divide([1, 8, 9, 4, 5], 2, 100) == [[[0, 2, 3]], [[1, 4]]]


def test_fewer_samples_than_ranks_leaves_empty_microbatches() -> None:
    assert divide([3], 2, 10) == [[[0]], [[]]]


def test_a_sample_above_the_limit_is_named() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has 11 tokens, more than training\.max_tokens_per_microbatch=10"):
        divide([3, 11], 1, 10)
