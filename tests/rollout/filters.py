"""Filters and formats of a user's, good and bad. A module of its own, which imports little: workers import it too."""

from __future__ import annotations

import asyncio
import time
from typing import Any


def low_numbers(record: dict[str, Any], rewards: list[float]) -> bool:
    if record["number"] == 3:
        raise KeyError("three")
    return record["number"] < 5 and len(rewards) == 2


async def every_other(groups: list[Any]) -> list[bool]:
    return [group.index % 2 == 0 for group in groups]


def hangs_on_odd(group: Any) -> bool:
    time.sleep(60 * (group.index % 2))
    return True


async def waits_on_odd(group: Any) -> bool:
    await asyncio.sleep(60 * (group.index % 2))
    return True


def unsure_on_odd(group: Any) -> Any:
    import numpy as np

    return np.ones(1 + group.index % 2, bool)


def always_fails(**given: Any) -> Any:
    raise KeyError("x")


def not_every_third(record: dict[str, Any]) -> list[int]:
    if record["number"] % 3 == 2:
        raise ValueError(f"number {record['number']} has no prompt")
    return [record["number"]]


def hangs_on_every_third(record: dict[str, Any]) -> list[int]:
    time.sleep(60 * (record["number"] % 3 == 2))
    return [record["number"]]


def nothing(groups: list[Any]) -> list[bool]:
    return [group.index == 0 for group in groups]
