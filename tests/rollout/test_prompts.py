import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from vime.config import Data, Rollout
from vime.errors import UserError
from vime.rollout.data.fingerprint import changes, fingerprint
from vime.rollout.data.format import FormatFailed
from vime.rollout.data.problem import Problem
from vime.rollout.data.sources import Problems
from vime.rollout.limits import Limits
from vime.rollout.prompts import Prompt, PromptFeed, PromptStream

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


async def by_length(problem: Problem) -> list[int]:
    if problem.answer == "":
        raise FormatFailed("no length", f"prompt {problem.prompt}")
    return [7] * int(problem.answer)


class Fed:
    """A feed of prompts of these lengths, None for those that the format fails on; what it has reported."""

    def __init__(self, *lengths: int | None, written: frozenset[int] = frozenset(), **rollout: Any) -> None:
        problems = tuple(Problem(f"q{i}", "" if n is None else str(n)) for i, n in enumerate(lengths))
        made = Rollout.model_validate({"samples_per_prompt": 4, "prompts_per_step": 2, "tries": 2, **rollout})
        limits = Limits(context=16, stop_token_ids=(2,), max_response=8)
        self.events: list[dict[str, Any]] = []
        self.feed = PromptFeed(
            problems, 0, False, by_length, limits, made,
            lambda event, **fields: self.events.append({"event": event, **fields}), written=written,
        )  # fmt: skip

    def take(self, count: int) -> list[Prompt]:
        async def run() -> list[Prompt]:
            return [await self.feed.take() for _ in range(count)]

        return asyncio.run(run())


def test_prompts_that_fill_the_context_are_filtered_and_counted() -> None:
    """Case 6: context 16, prompts of 15, 16, 17 and 10 tokens, at most 8 new tokens."""
    made = Fed(15, 16, 17, 10)
    taken = made.take(2)
    assert [(len(prompt.token_ids), prompt.max_tokens) for prompt in taken] == [(15, 1), (10, 6)]
    assert (made.feed.filtered, made.feed.dropped) == (2, 0)
    assert [prompt.index for prompt in taken] == [0, 3]


def test_prompts_that_are_all_too_long_end_in_an_error() -> None:
    with pytest.raises(UserError, match=r"none of the 1 prompts leaves room for a response in rollout.context=16"):
        Fed(20).take(1)


def test_prompts_that_the_format_fails_on_are_dropped_and_counted() -> None:
    made = Fed(1, None, 17, 2, None)
    assert [(prompt.index, len(prompt.token_ids)) for prompt in made.take(4)] == [(0, 1), (3, 2), (5, 1), (8, 2)]
    assert (made.feed.filtered, made.feed.dropped) == (2, 3 * 4)
    assert made.events[0] == {
        "event": "sample_dropped", "prompt": 1, "samples": 4, "tries": 2, "reasons": ["no length"]
    }  # fmt: skip
    assert [event["prompt"] for event in made.events] == [1, 4, 6]


def test_a_format_that_fails_on_and_on_ends_the_run() -> None:
    """As many prompts in a row as a step may lose; other ends of an epoch are told apart."""
    made = Fed(*[None] * 9, 1)
    with pytest.raises(UserError, match=r"^4 prompts in a row could not be made, at last: no length, on prompt q3$"):
        made.take(1)
    with pytest.raises(UserError, match=r"^2 prompts in a row could not be made, at last: no length, on prompt q1$"):
        Fed(None, None).take(1)
    with pytest.raises(UserError, match=r"^none of the 2 prompts leaves room"):
        Fed(20, None, 30).take(1)


def test_what_an_earlier_attempt_has_written_is_not_made_again() -> None:
    """Even where the format fails now; what lay between was left out then, or lost."""
    made = Fed(None, 1, 2, None, 3, written=frozenset({0, 3}))
    taken = made.take(3)
    assert [(prompt.index, len(prompt.token_ids)) for prompt in taken] == [(0, 0), (3, 0), (4, 3)]
    assert made.events == []


DATA = Data(source="jsonl", name="made", reward="exact")


def print_of(problems: tuple[Problem, ...], data: Data = DATA, template: str | None = "t") -> dict[str, Any]:
    return fingerprint(Problems(problems, ()), data, template)


EDITED = (*PROBLEMS, Problem("q4", "4"))


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (print_of(EDITED), "4 training problems then, 5 now"),
        (print_of(PROBLEMS[::-1]), "other prompts, or in another order"),
        (print_of((*PROBLEMS[:3], Problem("q3", "5"))), "other answers, or other fields"),
        (print_of((*PROBLEMS[:3], Problem("q3", "3", {"seed": 1}))), "other answers, or other fields"),
        (print_of(PROBLEMS, DATA.model_copy(update={"prompt_key": "question"})), "another data.prompt_key"),
        (print_of(PROBLEMS, DATA.model_copy(update={"format": "text"})), "another data.format"),
        (print_of(PROBLEMS, template="another"), "another chat template of the model"),
        (fingerprint(Problems(PROBLEMS, EDITED), DATA, "t"), "other held-out problems"),
    ],
)
def test_data_that_changed_is_named_and_refused_unless_asked_for(now: dict[str, Any], words: str) -> None:
    first = PromptStream(PROBLEMS, 3, shuffle=True, data=print_of(PROBLEMS))
    drawn(first, 6)
    cursor = json.loads(json.dumps(first.cursor()))
    assert drawn(PromptStream(PROBLEMS, 3, True, cursor, print_of(PROBLEMS)), 2) == drawn(first, 2)
    with pytest.raises(UserError, match=rf"^the data changed since the checkpoint: .*{words}.*data.allow_change=true$"):
        PromptStream(PROBLEMS, 3, True, cursor, now)
    problems = EDITED if now["problems"] == 5 else PROBLEMS
    again = PromptStream(problems, 3, True, cursor, now, allow_change=True)
    assert words in ", ".join(again.changes)
    taken = drawn(again, 2 * len(problems))
    assert [index for index, _ in taken] == list(range(6, 6 + 2 * len(problems))), "positions go on"
    assert Counter(prompt for _, prompt in taken) == {str(problem.prompt): 2 for problem in problems}
    later = PromptStream(problems, 3, True, again.cursor(), now)
    assert not later.changes
    assert drawn(later, 3) == drawn(again, 3)


def test_a_login_node_compares_what_it_knows() -> None:
    assert changes(print_of(PROBLEMS), print_of(PROBLEMS, template=None)) == []


def test_identities_are_the_same_in_every_process() -> None:
    assert Problem("q", "1", {"made": object()}).identity == Problem("q", "1", {"made": object()}).identity
    assert Problem("q", "1", {1: "a", "b": 2}).identity != Problem("q", "1", {1: "a", "b": 3}).identity
