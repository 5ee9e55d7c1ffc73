"""Curves as SVG that stands in a page: its colours are the page's, light or dark. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from tonari.report.pictures import COLOURS

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480.0, 240.0, 62.0, 12.0, 10.0, 26.0
LOG = 50.0
DOTS = 40
"""A curve of fewer points has dots."""

Point = tuple[float, float]
Scale = Literal["linear", "log", "share"]


@dataclass(frozen=True)
class Curve:
    """Values over steps.

    Attributes:
        name: In the legend.
        points: (step, value), by ascending steps; finite.
        band: (low, high) of what each point is the mean of; empty: each is one value.
    """

    name: str
    points: Sequence[Point]
    band: Sequence[Point] = ()


@dataclass(frozen=True)
class Chart:
    """Curves on common axes.

    Attributes:
        title: Above them.
        curves: One at least, each of some points.
        scale: How values are written and spaced: ``share`` in per cent, ``log`` by their
            logarithm where they differ by more than `LOG` times.
        until: The last step of the axis.
        marks: Steps to point at, from above.
        unit: What stands in place of steps.
    """

    title: str
    curves: Sequence[Curve]
    scale: Scale
    until: float
    marks: Sequence[float] = ()
    unit: str = "step"

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Colours and names."""
        return [(COLOURS[n % len(COLOURS)], curve.name) for n, curve in enumerate(self.curves)]

    def svg(self) -> str:
        """Draw them."""
        values = [value for curve in self.curves for _, value in curve.points]
        values += [value for curve in self.curves for pair in curve.band for value in pair]
        low, high = min(values), max(values)
        is_log = self.scale == "log" and low > 0 and high / low > LOG
        if not is_log:
            # Near 0, or of values that are all the same, it begins at 0
            low = min(low, 0.0) if low < high - low or low == high else low
            high = high if high > low else low + 1.0
        axis = _Axis(low, high, is_log)
        body = [
            f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{axis.y(at):.1f}" '
            f'y2="{axis.y(at):.1f}"/><text x="{LEFT - 6:g}" y="{axis.y(at) + 4:.1f}" '
            f'text-anchor="end">{self._words(at, axis)}</text>'
            for at in axis.ticks
        ]
        body += [
            f'<text x="{self._x(at):.1f}" y="{HEIGHT - 6:g}" text-anchor="middle">{at:,.0f}</text>'
            for at in _ticks(0, self.until)
            if at == int(at) and self._x(at) < WIDTH - RIGHT - 50
        ]
        for (colour, _), curve in zip(self.legend, self.curves, strict=True):
            body.append(self._drawn(curve, axis, colour))
        body += [f'<path class="mark" d="M{self._x(at) - 4:.1f} 1h8l-4 7z"/>' for at in self.marks]
        return (
            f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img"><title>{escape(self.title)}, by '
            f'{self.unit}</title>{"".join(body)}<text x="{WIDTH - RIGHT:g}" y="{HEIGHT - 6:g}" '
            f'text-anchor="end">{self.unit}</text></svg>'
        )

    def _x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / (self.until or 1.0)

    def _drawn(self, curve: Curve, axis: "_Axis", colour: str) -> str:
        at = [(self._x(step), axis.y(value)) for step, value in curve.points]
        drawn = f'<polyline points="{_path(at)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        if curve.band:
            upper = [(x, axis.y(high)) for (x, _), (_, high) in zip(at, curve.band, strict=True)]
            lower = [(x, axis.y(low)) for (x, _), (low, _) in zip(at, curve.band, strict=True)]
            band = _path([*upper, *reversed(lower)])
            drawn = f'<polygon points="{band}" fill="{colour}" fill-opacity="0.25"/>' + drawn
        dots = at if len(at) < DOTS else []
        return drawn + "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots
        )

    def _words(self, value: float, axis: "_Axis") -> str:
        times, unit = (100, " %") if self.scale == "share" else (1, "")
        if axis.is_log or len(axis.ticks) < 2:
            return f"{times * value:.3g}{unit}"
        apart = times * (axis.ticks[1] - axis.ticks[0])
        return f"{times * value:,.{max(0, -math.floor(math.log10(apart) + 1e-9))}f}{unit}"


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    is_log: bool

    def y(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (at - low) / (high - low)

    @property
    def ticks(self) -> list[float]:
        if not self.is_log:
            return _ticks(self.low, self.high)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        every = -(-len(powers) // 6)
        return [10.0**n for n in powers[::every] if self.low <= 10.0**n <= self.high]


def _ticks(low: float, high: float) -> list[float]:
    """Choose up to six round numbers."""
    unit = 10.0 ** math.floor(math.log10((high - low or 1.0) / 5))
    step = next(unit * n for n in (1, 2, 5, 10) if (high - low) / (unit * n) <= 5)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _path(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
