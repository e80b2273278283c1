from collections import Counter

import pytest

from vime.errors import UserError
from vime.rollout.feed import PromptFeed
from vime.rollout.limits import Limits
from vime.rollout.problem import Problem
from vime.rollout.prompts import PromptStream

PROBLEMS = tuple(Problem(f"q{i}", str(i)) for i in range(4))


def drawn(stream: PromptStream, count: int) -> list[tuple[int, str]]:
    return [(index, str(problem.prompt)) for index, problem in (stream.take() for _ in range(count))]


@pytest.mark.parametrize("stop", range(10))
def test_a_resumed_stream_goes_on_as_the_uninterrupted_one(stop: int) -> None:
    """Case 19, at the epoch boundary and everywhere else."""
    whole = drawn(PromptStream(PROBLEMS, 3, shuffle=True), 12)
    first = PromptStream(PROBLEMS, 3, shuffle=True)
    before = drawn(first, stop)
    after = drawn(PromptStream(PROBLEMS, 3, shuffle=True, cursor=first.cursor()), 12 - stop)
    assert before + after == whole
    assert Counter(prompt for _, prompt in whole) == {f"q{i}": 3 for i in range(4)}
    assert [index for index, _ in whole] == list(range(12))


def test_epochs_are_shuffled_anew_and_seeds_differ() -> None:
    problems = tuple(Problem(f"q{i}", "") for i in range(50))
    first, second = (drawn(PromptStream(problems, seed, shuffle=True), 100) for seed in (1, 2))
    epochs = [[prompt for _, prompt in first[:50]], [prompt for _, prompt in first[50:]]]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert first != second
    assert [p for _, p in drawn(PromptStream(problems, 1, shuffle=False), 50)] == [p.prompt for p in problems]


def test_a_cursor_of_other_data_is_refused() -> None:
    with pytest.raises(UserError, match="was the data changed"):
        PromptStream(PROBLEMS, 0, shuffle=True, cursor={"epoch": 0, "position": 9})


def by_length(problem: Problem) -> list[int]:
    return [7] * int(problem.answer)


def test_prompts_that_fill_the_context_are_filtered_and_counted() -> None:
    """Case 6: context 16, prompts of 15, 16, 17 and 10 tokens, at most 8 new tokens."""
    problems = tuple(Problem(f"q{n}", str(n)) for n in (15, 16, 17, 10))
    feed = PromptFeed(problems, 0, False, by_length, Limits(context=16, stop_token_ids=(2,), max_response=8))
    taken = [feed.take() for _ in range(2)]
    assert [(len(prompt.token_ids), prompt.max_tokens) for prompt in taken] == [(15, 1), (10, 6)]
    assert feed.filtered == 2
    assert [prompt.index for prompt in taken] == [0, 3]


def test_prompts_that_are_all_too_long_end_in_an_error() -> None:
    feed = PromptFeed((Problem("q", "20"),), 0, True, by_length, Limits(16, (2,), 8))
    with pytest.raises(UserError, match=r"rollout.context=16"):
        feed.take()
