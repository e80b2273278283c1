"""One line of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Row:
    """A ratio and what it is made of, as a person reads it.

    ours, limit: the two measured values with their units. at_least, at_most: the aim, where there is one.
    """

    what: str
    ours: str
    limit: str
    ratio: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the ratio is what it should be; None where nothing is aimed at."""
        if self.at_least is not None:
            return self.ratio >= self.at_least
        return None if self.at_most is None else self.ratio <= self.at_most

    @property
    def aim(self) -> str:
        """The aim in two words."""
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        return "" if self.at_most is None else f"at most {self.at_most:g}"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the rounds' own ratios: the two sides of a round ran next to each other, under the same load."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))
