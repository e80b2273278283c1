from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from vime.config import Data
from vime.errors import UserError
from vime.rollout.problem import Problem
from vime.rollout.rewards import Scorer, Unscored

HERE = "tests.rollout.test_rewards"
PROBLEM = Problem("q", "7", {"question": "q", "answer": "7", "metadata": {}})


def score(
    reward: str, responses: list[str], timeout: float = 5.0, reward_key: str | None = None, problem: Problem = PROBLEM
) -> list[Any]:
    source = "reasoning_gym" if reward == "task" else "jsonl"
    data = Data.model_validate({"source": source, "path": "x.jsonl", "reward": reward, "reward_key": reward_key})

    async def run() -> list[Any]:
        scorer = Scorer(data, timeout)
        try:
            return [str(r) if isinstance(r, Unscored) else r for r in await scorer.score(problem, responses)]
        finally:
            scorer.close()

    return asyncio.run(run())


def some_missing(responses: list[str], answer: str) -> list[float | None]:
    return [1.0 if response == answer else None for response in responses]


def all_missing(responses: list[str]) -> None:
    return None


def short_list(responses: list[str]) -> list[float]:
    return [1.0]


def raises_for_one(response: str) -> float:
    return 1 / len(response)


async def async_length(response: str, record: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return len(response) + len(record)


async def async_hangs(response: str) -> float:
    await asyncio.sleep(60)
    return 0.0


def hangs(response: str) -> float:
    time.sleep(60)
    return 0.0


def as_dict(response: str) -> dict[str, float]:
    return {"accuracy": 0.5, "format": 1.0}


def not_a_number(response: str) -> Any:
    return {"nan": float("nan"), "text": "good"}[response]


def takes_nothing(prompt: str) -> float:
    return 0.0


def test_the_tasks_own_scorer() -> None:
    assert score("task", ["7", " 7\n", "8"]) == [1.0, 1.0, pytest.approx(0.01, abs=0.02)]


def test_exact() -> None:
    assert score("exact", ["7", " 7 ", "07"]) == [1.0, 1.0, 0.0]


def test_missing_rewards_of_a_group() -> None:
    """Case 1: [1.0, None], None for all of it, and one that raises."""
    assert score(f"{HERE}:some_missing", ["7", "8"]) == [1.0, "returned None"]
    assert score(f"{HERE}:all_missing", ["7", "8"]) == ["returned None", "returned None"]
    assert score(f"{HERE}:raises_for_one", ["ab", ""]) == [0.5, "raised ZeroDivisionError: division by zero"]
    assert score(f"{HERE}:not_a_number", ["nan", "text"]) == ["returned nan", "returned a str, not a number"]


def test_a_list_of_the_wrong_length_is_an_error() -> None:
    with pytest.raises(UserError, match="got 2 responses and must return as many"):
        score(f"{HERE}:short_list", ["7", "8"])


def test_dict_rewards_need_a_key() -> None:
    assert score(f"{HERE}:as_dict", ["x"], reward_key="format") == [1.0]
    with pytest.raises(UserError, match=r"without data.reward_key='style'; it has accuracy, format"):
        score(f"{HERE}:as_dict", ["x"], reward_key="style")
    with pytest.raises(UserError, match=r"set data.reward_key"):
        score(f"{HERE}:as_dict", ["x"])


def test_async_and_hanging_functions() -> None:
    assert score(f"{HERE}:async_length", ["abc"]) == [6]
    begun = time.monotonic()
    for name in ("hangs", "async_hangs"):
        assert score(f"{HERE}:{name}", ["a", "b"], timeout=0.2) == ["took more than rollout.reward_timeout=0.2 s"] * 2
    assert time.monotonic() - begun < 5


def test_a_function_that_takes_no_response_is_refused() -> None:
    with pytest.raises(UserError, match="takes neither `response` nor `responses`"):
        score(f"{HERE}:takes_nothing", ["x"])
    with pytest.raises(UserError, match="has no nowhere"):
        score(f"{HERE}:nowhere", ["x"])


def test_math_verify() -> None:
    """In workers, whose main thread its alarms need; the caller's is asyncio's."""
    half = Problem("q", "$\\frac{1}{2}$")
    assert score("math_verify", ["$0.5$", "so it is \\boxed{\\frac{2}{4}}", "$1$", "no idea"], 60, problem=half) == [
        1,
        1,
        0,
        0,
    ]


def test_a_reference_that_cannot_be_read_is_not_a_wrong_answer() -> None:
    (reason,) = score("math_verify", ["$1$"], 60, problem=Problem("q", "?"))
    assert "finds no expression in the reference answer '?'" in reason
