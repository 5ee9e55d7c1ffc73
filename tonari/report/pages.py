"""Reports, as one page each that needs nothing else: no script, no font, no file beside it."""

import base64
from dataclasses import dataclass
from pathlib import Path

from tonari.report.pictures import Draw, darkened, render

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Picture:
    """A plot twice, as data URIs, for light and dark pages."""

    title: str
    caption: str
    light: str
    dark: str


def picture(title: str, caption: str, draw: Draw, inches: tuple[float, float]) -> Picture:
    """Draw a plot for a page."""
    light = render(draw, inches=inches, kind="svg")
    return Picture(title, caption, _uri(light), _uri(darkened(light)))


def drawn(title: str, caption: str, light: str, dark: str) -> Picture:
    """Take a plot that is SVG already, in light and dark colours."""
    return Picture(title, caption, _uri(light.encode()), _uri(dark.encode()))


def lay_out(template: Path, **values: object) -> str:
    """Fill in a report's template, which extends ``page.jinja``; needs the `report` extra.

    Raises:
        jinja2.UndefinedError: If the template names a value that is not given.
    """
    # Only now: who only measures needs no extra
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FileSystemLoader([template.parent, HERE]),
    )  # fmt: skip
    return environment.get_template(template.name).render(values)


def _uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
