"""A series as one line of block characters, and the bounded thinning of a long series to the points of such a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"


class Curve:
    """At most `capacity` means of equally many consecutive values, however many values come."""

    def __init__(self, capacity: int = 64) -> None:
        if capacity < 2 or capacity % 2:
            raise ValueError(f"capacity must be even and at least 2, not {capacity}")
        self.capacity = capacity
        self.width = 1  # values in one bin
        self._bins: list[tuple[float, int]] = []

    def add(self, value: float) -> None:
        """Append one finite value."""
        if self._bins and self._bins[-1][1] < self.width:
            total, count = self._bins[-1]
            self._bins[-1] = (total + value, count + 1)
            return
        if len(self._bins) == self.capacity:
            pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
            self._bins = [(a + b, n + m) for (a, n), (b, m) in pairs]
            self.width *= 2
        self._bins.append((value, 1))

    def means(self) -> list[float]:
        """The mean of each bin; the last may hold fewer values than the others."""
        return [total / count for total, count in self._bins]


def sparkline(values: Sequence[float], width: int = 40, blocks: str = BLOCKS) -> str:
    """`values` as at most `width` characters from lowest to highest; a flat series is drawn in the middle."""
    points = _resample([v for v in values if math.isfinite(v)], width)
    if not points:
        return ""
    low, high = min(points), max(points)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return blocks[len(blocks) // 2 - 1] * len(points)
    top = len(blocks) - 1
    return "".join(blocks[round((v - low) / (high - low) * top)] for v in points)


def bar(share: float, width: int = 24, full: str = "█", empty: str = " ") -> str:
    """`share` (0 to 1) as a bar of `width` characters; anything above 0 shows at least one."""
    if not math.isfinite(share) or share <= 0:
        return empty * width
    filled = min(width, max(1, round(share * width)))
    return full * filled + empty * (width - filled)


def _resample(values: list[float], width: int) -> list[float]:
    """Means of `width` slices when there are more values than that."""
    count = len(values)
    if count <= width:
        return values
    edges = [i * count // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
