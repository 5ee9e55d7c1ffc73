"""Pictures made of plots: one style, light and dark, the same bytes for the same figures."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[["Figure"], None]
"""Draws onto a figure."""

COLOURS = ("#d55e00", "#1f86cc", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#9467bd", "#8c564b")
"""Of what is compared: different to any colour vision, on white and black (after Okabe, Ito)."""

# Nothing may be drawn in these: they change for a dark page.
LIGHT = {"text": "#1c2024", "paper": "#ffffff", "grid": "#dfe3e8"}
DARK = {"text": "#e6e9ec", "paper": "#171a1e", "grid": "#343a41"}

UNDATED = {
    "png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None, "ModDate": None}
}  # fmt: skip
"""By kind of file, which dates are not written, so that the same figures make the same bytes."""


def render(draw: Draw, *, inches: tuple[float, float], kind: str) -> bytes:
    """Draw a figure as a file's bytes, of a kind in `UNDATED`, in the colours of a light page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    text, paper = LIGHT["text"], LIGHT["paper"]
    file = io.BytesIO()
    with rc_context(
        {
            "text.color": text, "axes.labelcolor": text, "axes.edgecolor": text,
            "xtick.color": text, "ytick.color": text,
            "figure.facecolor": paper, "axes.facecolor": paper, "savefig.facecolor": paper,
            "axes.grid": True, "axes.axisbelow": True, "grid.color": LIGHT["grid"],
            "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
            "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
            "font.size": 11, "svg.hashsalt": "tonari",
            # A name is a name, whatever it holds
            "text.parse_math": False,
        }
    ):  # fmt: skip
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure)
        figure.savefig(file, format=kind, dpi=150, metadata=UNDATED[kind])
    return file.getvalue()


def write_picture(path: Path, draw: Draw, *, inches: tuple[float, float]) -> None:
    """Draw a figure into a file, of the kind that its name ends in."""
    path.write_bytes(render(draw, inches=inches, kind=path.suffix.removeprefix(".")))


def darkened(svg: bytes) -> bytes:
    """Put a drawn SVG into the colours of a dark page."""
    for name, colour in LIGHT.items():
        svg = svg.replace(colour.encode(), DARK[name].encode())
    return svg
