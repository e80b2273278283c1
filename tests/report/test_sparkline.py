"""Drawing series."""

import math

import pytest

from vime.report.sparkline import Curve, bar, sparkline


def test_lowest_to_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"


def test_flat_empty_and_nonfinite() -> None:
    assert sparkline([0.3, 0.3, 0.3]) == "▄▄▄"
    assert sparkline([]) == ""
    assert sparkline([math.nan, 0.0, math.inf, 1.0]) == "▁█"


def test_long_series_is_averaged_to_the_width() -> None:
    assert sparkline([0, 0, 0, 0, 1, 1, 1, 1], width=2) == "▁█"
    assert len(sparkline([i % 17 for i in range(1001)], width=40)) == 40


def test_curve_keeps_every_value_in_some_mean() -> None:
    curve = Curve(4)
    for value in range(9):
        curve.add(float(value))
    assert curve.width == 4
    assert curve.means() == [1.5, 5.5, 8.0]
    with pytest.raises(ValueError, match="even"):
        Curve(3)


@pytest.mark.parametrize(
    ("share", "filled"), [(0.0, 0), (0.001, 1), (0.5, 5), (1.0, 10), (1.7, 10), (math.nan, 0), (-1, 0)]
)
def test_bar(share: float, filled: int) -> None:
    assert bar(share, 10) == "█" * filled + " " * (10 - filled)
