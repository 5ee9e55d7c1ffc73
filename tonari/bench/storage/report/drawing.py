"""What all plots of a storage report share: colours, units of axes, and pictures made of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import FigureBase

# Different for any colour vision, on white and on black (after Okabe and Ito)
STATES = {"cold": "#1f86cc", "warm": "#d55e00", "unknown": "#8d949b"}
LOCAL = "#009e73"
COMPUTE, WAIT, STAGING = "#5f7d95", "#e69f00", "#cc79a7"
WAYS = {
    "null": "#8d949b", "dataloader": "#d55e00", "staged": "#1f86cc", "exchange": "#009e73",
    "hiding": "#cc79a7",
}  # fmt: skip
WAY_WORDS = {
    "null": "from memory", "dataloader": "DataLoader on DIR", "staged": "staged",
    "exchange": "staged, exchange", "hiding": "staged, exchange,\nhiding",
}  # fmt: skip

Draw = Callable[["FigureBase"], None]


def words(pattern: str) -> str:
    """Write a pattern's name for people."""
    return pattern.replace("_", " ")


def write_units(axis: "Axis", write: Callable[[float], str]) -> None:
    """Label an axis's ticks by one of the above; of a logarithmic one also within a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        decades = np.log10(high / low)
        few = (1.0, 2.0, 5.0) if decades < 1.4 else (1.0, 3.0) if decades < 2.6 else (1.0,)
        axis.set_major_locator(LogLocator(subs=few))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axis.set_minor_formatter(NullFormatter())


def name_rows(axes: "Axes", names: list[str]) -> None:
    """Name horizontal rows, the first at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
