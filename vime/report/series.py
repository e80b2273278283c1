"""One metric over the steps of a run, gathered in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Literal

from vime.config.section import Frozen
from vime.report.sparkline import Curve

ENDS = 5  # steps averaged at either end of a run, so that one lucky step does not stand for it


class Point(Frozen):
    """A value and the step it belongs to."""

    step: int
    value: float


class Series(Frozen):
    """A metric over all steps that reported a finite value."""

    count: int
    """Steps with a finite value."""
    nonfinite: int
    """Steps whose value was NaN or infinite; they count nowhere else."""
    first: Point
    last: Point
    best: Point
    """Highest or lowest value, whichever is better for this metric; the earliest of equals."""
    worst: Point
    mean: float
    """Over steps; a rate's mean is weighted by the seconds it was measured over."""
    first_mean: float
    """Mean of the first 5 steps (fewer when there are fewer)."""
    last_mean: float
    """Mean of the last 5 steps (fewer when there are fewer)."""
    curve: list[float]
    """At most 64 means of equally many consecutive steps, for drawing."""


class Gather:
    """Builds a Series from values in step order."""

    def __init__(self, better: Literal["high", "low"] = "high") -> None:
        self._sign = 1.0 if better == "high" else -1.0
        self._curve = Curve()
        self._head: list[tuple[int, float]] = []  # (step, value); Points are made once, at the end
        self._tail: deque[tuple[int, float]] = deque(maxlen=ENDS)
        self._best: tuple[int, float] | None = None
        self._worst: tuple[int, float] | None = None
        self._total = self._weight = 0.0
        self._count = 0
        self.nonfinite = 0

    def add(self, step: int, value: Any, weight: float = 1.0) -> None:
        """Take one step's value. Absent (None) and non-numeric ones are passed over, non-finite ones counted apart."""
        number = as_number(value)
        if number is None:
            return
        if not math.isfinite(number):
            self.nonfinite += 1
            return
        point = (step, number)
        if self._best is None or (number - self._best[1]) * self._sign > 0:
            self._best = point
        if self._worst is None or (number - self._worst[1]) * self._sign < 0:
            self._worst = point
        if len(self._head) < ENDS:
            self._head.append(point)
        self._tail.append(point)
        self._curve.add(number)
        self._count += 1
        self._total += number * weight
        self._weight += weight

    def series(self) -> Series | None:
        """What was gathered; None when no step had a finite value."""
        if self._best is None or self._worst is None:
            return None
        return Series(
            count=self._count,
            nonfinite=self.nonfinite,
            first=_point(self._head[0]),
            last=_point(self._tail[-1]),
            best=_point(self._best),
            worst=_point(self._worst),
            mean=self._total / self._weight if self._weight else self._tail[-1][1],
            first_mean=sum(value for _, value in self._head) / len(self._head),
            last_mean=sum(value for _, value in self._tail) / len(self._tail),
            curve=self._curve.means(),
        )


def _point(pair: tuple[int, float]) -> Point:
    return Point(step=pair[0], value=pair[1])


def as_number(value: Any) -> float | None:
    """A JSON number as float (it may be NaN); None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
