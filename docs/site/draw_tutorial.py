"""Draw the figures of the tutorial, of what its pages show: `python docs/site/draw_tutorial.py`."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

FIGURES = Path(__file__).parents[1] / "tutorial/figures"
STYLE = """
  .page{fill:#ffffff} .ink{fill:#17302d} .soft{fill:#4f6b67} .bar{fill:#2fa08f}
  .line{fill:none;stroke:#2fa08f;stroke-width:2.5} .axis{stroke:#9fb8b4;fill:none}
  @media (prefers-color-scheme: dark){
    .page{fill:#0f1716} .ink{fill:#e6f1ef} .soft{fill:#a3bab6} .bar{fill:#3bb5a2}
    .line{stroke:#4cc9b6} .axis{stroke:#5f7a75}
  }
  text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;font-size:14px}
  .big{font-size:16px;font-weight:600} .end{text-anchor:end}
"""


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Draw a bar a row: its label, its length, what it says."""
    most = max(value for _, value, _ in rows)
    drawn = []
    for number, (label, value, words) in enumerate(rows):
        y, length = 58 + 28 * number, 400 * value / most
        drawn += [
            f'<text class="soft end" x="200" y="{y + 15}">{escape(label)}</text>',
            f'<rect class="bar" x="212" y="{y}" width="{length:.1f}" height="20" rx="3"/>',
            f'<text class="ink" x="{220 + length:.1f}" y="{y + 15}">{escape(words)}</text>',
        ]
    return picture(title, 72 + 28 * len(rows), drawn)


def lines(title: str, at: Sequence[int], curves: Mapping[str, Sequence[float]]) -> str:
    """Draw a curve over epochs for each name, all values in [0, 0.5]."""
    drawn = ['<path class="axis" d="M80 52 V280 H600"/>']
    for value in (0.0, 0.25, 0.5):
        drawn.append(f'<text class="soft end" x="72" y="{285 - 440 * value:.0f}">{value}</text>')
    for epoch in at:
        drawn.append(f'<text class="soft" x="{76 + 57 * epoch}" y="300">{epoch}</text>')
    for name, values in curves.items():
        points = [
            (80 + 57 * epoch, 280 - 440 * value) for epoch, value in zip(at, values, strict=True)
        ]
        path = " L".join(f"{x} {y:.1f}" for x, y in points)
        x, y = points[-1]
        drawn.append(f'<path class="line" d="M{path}"/>')
        drawn.append(f'<text class="ink" x="{x + 10}" y="{y + 5:.1f}">{escape(name)}</text>')
    drawn.append('<text class="soft end" x="600" y="318">epoch</text>')
    return picture(title, 330, drawn)


def picture(title: str, height: int, drawn: Sequence[str]) -> str:
    """Put a title above, in the reader's light or dark colours."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="page" width="760" height="{height}" rx="10"/>',
        f'<text class="ink big" x="24" y="32">{escape(title)}</text>',
    ]
    return "\n".join([*head, *drawn, "</svg>\n"])


def main() -> None:
    """Draw all four."""
    FIGURES.mkdir(exist_ok=True)
    starts = [("first start", 3.02, "3.02 MB"), ("second start", 0.0, "0.00 MB")]
    hidden = [0, 27, 29, 22, 22, 18, 18, 11]
    epochs = [
        ("null: from memory", 0.14, "0.14 s"),
        ("DataLoader on the directory", 0.17, "0.17 s, its first 0.42 s"),
        ("staged", 0.08, "0.08 s, its first 0.14 s"),
        ("and an exchange", 0.07, "0.07 s, its first 0.13 s"),
        ("and hidden samples", 0.10, "0.10 s, its first 0.10 s"),
    ]
    distances = {
        "Local, no exchange": [0.5] * 5,
        "Partial 0.1": [0.5, 0.4012, 0.3177, 0.1451, 0.0588],
        "Partial 0.3": [0.5, 0.2008, 0.0880, 0.0386, 0.0184],
    }
    drawn = {
        "first_epoch": bars("Read from the shards before the first epoch", starts),
        "two_nodes": lines("Distance of a node's classes", [0, 1, 2, 5, 9], distances),
        "leave_out": bars(
            "Hidden samples", [(f"epoch {n}", v, f"{v} %") for n, v in enumerate(hidden)]
        ),
        "filesystem": bars("The last epoch in each way", epochs),
    }
    for name, figure in drawn.items():
        (FIGURES / f"{name}.svg").write_text(figure)


if __name__ == "__main__":
    main()
