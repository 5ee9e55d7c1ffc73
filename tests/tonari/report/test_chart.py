"""Curves as SVG."""

import re

import pytest

from tonari.report.chart import HEIGHT, WIDTH, Chart, Curve, Scale


def words(*values: float, scale: Scale = "linear") -> list[str]:
    """Draw values over steps, and list what the vertical axis says."""
    curve = Curve("<a & b>", [*enumerate(values)])
    svg = Chart("x", [curve], scale, len(values) - 1).svg()
    (path,) = re.findall(r'<polyline points="([^"]*)"', svg)
    places = [[float(number) for number in point.split(",")] for point in path.split()]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)
    by_value = sorted(zip(values, (y for _, y in places), strict=True))
    assert [y for _, y in by_value] == sorted((y for _, y in places), reverse=True)
    return re.findall(r'text-anchor="end">([^<s]*)</text>', svg)


@pytest.mark.parametrize(
    ("values", "scale", "said"),
    [
        ((0.0, 0.5, 1.0), "linear", ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((99.5, 100.0, 101.0), "linear", ["99.5", "100.0", "100.5", "101.0"]),
        ((0.0, 12_000.0), "linear", ["0", "5,000", "10,000"]),
        (
            (2e-5, 1e-4),
            "linear",
            ["0.00000", "0.00002", "0.00004", "0.00006", "0.00008", "0.00010"],
        ),
        ((0.2, 0.2), "share", ["0 %", "5 %", "10 %", "15 %", "20 %"]),
        ((-1.0, 1.0), "linear", ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        ((0.0, 0.0), "linear", ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((0.005, 7.0), "log", ["0.01", "0.1", "1"]),
        ((0.0, 7.0), "log", ["0", "2", "4", "6"]),
    ],
)
def test_the_axis_says_round_numbers_that_differ(values, scale, said) -> None:
    assert words(*values, scale=scale) == said
