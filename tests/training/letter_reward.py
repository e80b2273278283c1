"""A reward that differs between any two answers of an untrained policy, so that every group teaches something."""

from __future__ import annotations


def letter_reward(response: str) -> float:
    """From 0 to 1, by the bytes of the text."""
    return sum(response.encode()) % 7 / 6
