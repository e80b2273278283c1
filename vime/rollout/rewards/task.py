"""reasoning_gym's own scorers. Runs in a worker: some evaluate the response, see `safe_text`."""

from __future__ import annotations

import functools
import json
from typing import Any


def score(response: str, record: dict[str, Any], task: str, task_args: str) -> float:
    """The task's score of a response, 0 to 1. task_args: JSON.

    0 for text that the scorer trips over, or that it would evaluate and may not. Raises what the scorer raises on the
    reference answer too: then it cannot look, and the response is not to blame.
    """
    dataset, refused = prepare(task, task_args)
    refused.clear()
    try:
        value = float(dataset.score_answer(response.strip(), record))
    except Exception:  # noqa: BLE001 - whatever a scorer trips over
        dataset.score_answer(record["answer"], record)
        return 0.0
    return 0.0 if refused else value


@functools.cache
def prepare(task: str, task_args: str) -> tuple[Any, list[Exception]]:
    """The task's scorer, and the list to which each evaluation that is refused is added."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(task_args))
    return dataset, _guarded()


@functools.cache
def _guarded() -> list[Exception]:
    from vime.rollout.rewards.safe_text import guard_evaluators

    return guard_evaluators()  # type: ignore[return-value]
