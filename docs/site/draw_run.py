"""Draw docs/assets/run_page.svg, of docs/train.md: `python docs/site/draw_run.py RUN`.

RUN is a run's directory; some of the charts of its page are put beside one another. The picture
follows the reader's light or dark colours.
"""

import sys
from html import escape
from pathlib import Path

from draw_ring import STYLE  # type: ignore[import-not-found]

from tonari.report.chart import HEIGHT, LEFT, WIDTH, Chart
from tonari.trainer.watch.history import read_history
from tonari.trainer.watch.page import charts_of

SHOWN = (
    "Loss",
    "Accuracy on the test data",
    "Hidden samples",
    "Seconds of an epoch, steps left out",
)
HEAD, GAP = 66, 20
COLUMNS = 2


def placed(number: int, chart: Chart) -> str:
    """Put a chart in its place, below its title and legend."""
    x, y = number % COLUMNS * (WIDTH + GAP), number // COLUMNS * (HEAD + HEIGHT + GAP)
    row, at, words = 0, LEFT, []
    for colour, name in chart.legend:
        width = 22 + 6.5 * len(name)
        if at + width > WIDTH:
            row, at = row + 1, LEFT
        top = y + 26 + 18 * row
        words.append(
            f'<rect x="{x + at:.0f}" y="{top}" width="11" height="11" fill="{colour}"/>'
            f'<text class="soft small" x="{x + at + 16:.0f}" y="{top + 10}">{escape(name)}</text>'
        )
        at += width + 12
    curves = chart.svg().replace(
        "<svg ", f'<svg x="{x}" y="{y + HEAD}" width="{WIDTH}" height="{HEIGHT}" '
    )
    title = f'<text class="ink" x="{x + LEFT}" y="{y + 16}">{escape(chart.title)}</text>'
    return title + "".join(words) + curves


def draw(charts: list[Chart], title: str) -> str:
    """Draw the charts."""
    width, height = COLUMNS * (WIDTH + GAP) - GAP, len(charts) // COLUMNS * (HEAD + HEIGHT + GAP)
    style = (
        ".soft.small,svg svg text{font-size:13px} svg svg text{fill:#5b6570} .grid{stroke:#dfe3e8} "
        ".mark{fill:#b3341b} "
        "@media (prefers-color-scheme: dark){svg svg text{fill:#a3bab6} .grid{stroke:#343a41} "
        ".mark{fill:#f2957f}}"
    )
    body = "\n".join(placed(number, chart) for number, chart in enumerate(charts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}{style}</style>\n"
        f'<rect class="page" width="{width:g}" height="{height:g}"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    history = read_history(Path(sys.argv[1]) / "metrics.jsonl")
    shown = [chart for chart in charts_of(history) if chart.title in SHOWN]
    title = "Charts of a run's page: loss, accuracy, hidden samples, seconds beside the steps"
    (Path(__file__).parents[1] / "assets/run_page.svg").write_text(draw(shown, title))
