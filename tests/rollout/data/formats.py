"""Formats of a user's, good and bad. A module of its own, which imports little: workers import it too."""

from __future__ import annotations

import asyncio
import time
from typing import Any


def letters(record: dict[str, Any], tokenizer: Any) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(letter) for letter in record["word"]]


def out_of_range(record: dict[str, Any], tokenizer: Any) -> list[int]:
    return [len(tokenizer)]


async def letters_awaited(tokenizer: Any, record: dict[str, Any]) -> list[int]:
    await asyncio.sleep(0)
    return letters(record, tokenizer)


def letters_of_numpy(**given: Any) -> Any:
    import numpy as np

    return np.array(letters(**given))


def of_other_arguments(text: str) -> list[int]:
    return []


def as_recorded(record: dict[str, Any]) -> Any:
    return record["returned"]


def hangs(record: dict[str, Any]) -> list[int]:
    time.sleep(60)
    return [1]


async def waits_for_ever(record: dict[str, Any]) -> list[int]:
    await asyncio.sleep(60)
    return [1]


async def blocks(record: dict[str, Any]) -> list[int]:
    time.sleep(60)
    return [1]


def changes_its_tokenizer(record: dict[str, Any], tokenizer: Any) -> list[int]:
    return list(tokenizer("abcdef", truncation=True, max_length=2, add_special_tokens=False)["input_ids"])


def broken(record: dict[str, Any], tokenizer: Any) -> list[int]:
    return [record["x"]]
