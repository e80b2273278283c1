"""A reward that an untrained model can earn and improve: the share of letters in its response."""

from __future__ import annotations


def score(response: str) -> float:
    """0 to 1."""
    return sum(character.isalpha() for character in response) / max(len(response), 1)
