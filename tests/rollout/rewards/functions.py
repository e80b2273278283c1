"""Rewards of a user's, good and bad. A module of its own, which imports little: workers import it too."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from pathlib import Path
from typing import Any


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


def times_out(response: str) -> float:
    raise TimeoutError("my own")


def exits(response: str) -> float:
    sys.exit(3)


async def async_exits(response: str) -> float:
    sys.exit(4)


def stops(response: str) -> float:
    raise StopIteration("x")


async def async_stops(response: str) -> float:
    raise StopIteration("x")


def interrupts(response: str) -> float:
    raise KeyboardInterrupt


def recurses(response: str) -> float:
    return recurses(response)


async def async_blocks(response: str) -> float:
    time.sleep(60)
    return 0.0


class AsyncLength:
    async def __call__(self, response: str) -> float:
        return len(response)


async_object = AsyncLength()


def with_metadata(response: str, metadata: dict[str, Any]) -> float:
    return len(response) + metadata["turns"]


def notes_its_span(response: str, record: dict[str, Any]) -> float:
    begun = time.monotonic()
    time.sleep(0.02)
    with open(record["file"], "a") as file:
        file.write(f"{begun} {time.monotonic()} {os.getpid()}\n")
    return 1.0


def backtracks(response: str) -> float:
    """Holds the interpreter's lock for ever."""
    return float(bool(re.match(r"(a+)+$", "a" * 40 + "b")))


def leaves(response: str) -> float:
    os._exit(0)


def forks(response: str, record: dict[str, Any]) -> float:
    """Leaves a child in a session of its own, whose parent has ended."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(record["file"]).write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not Path(record["file"]).exists() or not Path(record["file"]).read_text():
        time.sleep(0.001)
    return 1.0


def sees(response: str) -> float:
    """1 when the run's token is nowhere in what it is given."""
    return float("secret-token" not in str(dict(os.environ)) and "secret-token" not in str(sys.argv))


async def async_changes_metadata(response: str, metadata: dict[str, Any]) -> float:
    metadata["turns"] = {1}
    return 1.0


def wants_more(response: str, tokens: int) -> float:
    return 0.0


def takes_record(response: str, record: dict[str, Any]) -> float:
    return 0.0


def takes_nothing(prompt: str) -> float:
    return 0.0


def runs(code: str) -> str:
    """What an evaluator would do with hostile text."""
    import socket  # noqa: F401

    return repr(eval(code))  # noqa: S307 - that is the test


def backtracks_on(response: str) -> float:
    return backtracks(response) if response == "a" else 1.0
