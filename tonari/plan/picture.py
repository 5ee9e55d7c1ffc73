"""Where the time goes, as stacked bars in an SVG that needs nothing else; light and dark. Pure."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from tonari.report.pictures import COLOURS, DARK, LIGHT

if TYPE_CHECKING:
    from tonari.oracle.plan import StepPlan
    from tonari.oracle.search.search import Plans

WIDTH, MARGIN = 960.0, 24.0
INNER = WIDTH - 2 * MARGIN
FONT, LINE, BAR, GAP = 14.0, 20.0, 30.0, 16.0
LETTER = 0.68 * FONT
"""Wider than a mean letter of any usual font."""
SWATCH = 12.0
LEAST_SHOWN = 0.045
"""Share of the widest bar into which its percentage fits."""


@dataclass(frozen=True)
class Bar:
    """A time and its parts.

    Attributes:
        label: Above it.
        parts_s: Seconds by name; their order is the same in all bars.
    """

    label: str
    parts_s: Mapping[str, float]

    @property
    def whole_s(self) -> float:
        """The parts together."""
        return sum(self.parts_s.values())


Scheme = Literal["light", "dark", "both"]
"""Colours: those of a page, or both, of which who shows the file chooses."""


@dataclass(frozen=True)
class Drawing:
    """Bars of one scale under each other.

    Attributes:
        title: Of them all.
        bars: One at least, that takes some time.
    """

    title: str
    bars: Sequence[Bar]

    def svg(self, scheme: Scheme = "both", *, titled: bool = True) -> str:
        """Draw them, with a legend below, and the title above where it is asked for."""
        longest_s = max(bar.whole_s for bar in self.bars)
        names = list(dict.fromkeys(
            name for bar in self.bars for name, seconds in bar.parts_s.items() if seconds > 0
        ))  # fmt: skip
        looks = {name: _look(number) for number, name in enumerate(names)}
        body: list[str] = []
        top = _write(body, self.title, MARGIN, kind=' class="title"') if titled else 0.0
        for bar in self.bars:
            top = _write(body, bar.label, top + GAP)
            _draw_bar(body, bar, top, looks, longest_s)
            top += BAR
        parts_s = self.bars[0].parts_s if len(self.bars) == 1 else {}
        entries = {name: name + _figures(parts_s.get(name), longest_s) for name in names}
        bottom = _draw_legend(body, entries, top + GAP, looks) + MARGIN
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:g}" height="{bottom:g}" '
            f'viewBox="0 0 {WIDTH:g} {bottom:g}" role="img">',
            f"<title>{escape(self.title)}</title>",
            _style(scheme),
            f'<rect class="paper" width="{WIDTH:g}" height="{bottom:g}"/>',
            *body,
            "</svg>\n",
        ])  # fmt: skip


def _style(scheme: Scheme) -> str:
    def rules(colours: Mapping[str, str]) -> str:
        return (
            f"text {{ fill: {colours['text']}; }} .paper {{ fill: {colours['paper']}; }} "
            f".part {{ stroke: {colours['paper']}; }}"
        )

    dark = f" @media (prefers-color-scheme: dark) {{ {rules(DARK)} }}" if scheme == "both" else ""
    return (
        f"<style>text {{ font: {FONT:g}px system-ui, sans-serif; }} "
        f".title {{ font-weight: 700; }} text.share {{ fill: #000000; text-anchor: middle; }} "
        f"{rules(DARK if scheme == 'dark' else LIGHT)}{dark}</style>"
    )


def part_name(name: str) -> str:
    """Name a part of a simulated step, as `tonari.oracle.simulate.Span` has it."""
    return "computing" if name == "compute" else f"waiting: {name.replace('_', '-')}"


def plan_bars(planned: "StepPlan") -> Drawing:
    """Lay out an epoch, with its steps in their parts; or a step, where no data was probed."""
    parts_s = dict(sorted(planned.parts_s.items(), key=lambda part: -part[1]))
    step = {part_name(name): seconds for name, seconds in parts_s.items()}
    epoch = planned.epoch
    if epoch is None:
        label = f"a step: {planned.step_s:.3g} s; a rank's mean"
        return Drawing("Where a step's time goes, as simulated", [Bar(label, step)])
    scale = epoch.train_s / sum(step.values())
    of_steps = {f"steps, {name}": seconds * scale for name, seconds in step.items()}
    others = {name: seconds for name, seconds in epoch.parts_s.items() if name != "steps"}
    label = f"an epoch: {epoch.epoch_s:.4g} s, {epoch.steps:,} steps; a rank's mean"
    return Drawing("Where an epoch's time goes, as simulated", [Bar(label, of_steps | others)])


def search_bars(found: "Plans") -> Drawing:
    """Lay out a step, or an epoch, of each of the fastest configurations."""
    bars = []
    for number, each in enumerate(found.candidates, 1):
        settings = " ".join((*each.settings, *each.choice)).replace("mesh.", "")
        label = f"{number}. {each.epoch_s or each.step_s:.4g} s: {settings}"
        bars.append(Bar(label, each.parts_s))
    whole = "an epoch" if found.candidates[0].epoch_s else "a step"
    title = f"Where {whole}'s time goes, of the fastest {len(bars)}, as estimated"
    return Drawing(title, bars)


def _look(number: int) -> str:
    """Colour a part; the names behind the colours' last are paler."""
    lap, colour = divmod(number, len(COLOURS))
    return f'fill="{COLOURS[colour]}"' + (' fill-opacity="0.55"' if lap else "")


def _write(body: list[str], words: str, top: float, *, kind: str = "") -> float:
    """Set words in lines from the left, and return where the next thing begins."""
    for line in textwrap.wrap(words, int(INNER / LETTER)):
        body.append(f'<text{kind} x="{MARGIN:g}" y="{top + FONT:g}">{escape(line)}</text>')
        top += LINE
    return top


def _draw_bar(
    body: list[str], bar: Bar, top: float, looks: Mapping[str, str], longest_s: float
) -> None:
    widths = [INNER * bar.parts_s.get(name, 0.0) / longest_s for name in looks]
    lefts = accumulate(widths[:-1], initial=MARGIN)
    for (name, look), left, width in zip(looks.items(), lefts, widths, strict=True):
        if not width:
            continue
        seconds = bar.parts_s[name]
        hint = f"<title>{escape(name)}{_figures(seconds, bar.whole_s)}</title>"
        body.append(
            f'<rect class="part" x="{left:.2f}" y="{top:g}" width="{width:.2f}" '
            f'height="{BAR:g}" {look}>{hint}</rect>'
        )
        if width >= LEAST_SHOWN * INNER:
            body.append(
                f'<text class="share" x="{left + width / 2:.2f}" y="{top + BAR / 2 + FONT / 3:g}">'
                f"{seconds / bar.whole_s:.0%}</text>"
            )


def _draw_legend(
    body: list[str], entries: Mapping[str, str], top: float, looks: Mapping[str, str]
) -> float:
    left = MARGIN
    for name, words in entries.items():
        width = SWATCH + 6 + LETTER * len(words)
        if left > MARGIN and left + width > WIDTH - MARGIN:
            left, top = MARGIN, top + LINE
        body.append(
            f'<rect x="{left:g}" y="{top + 3:g}" width="{SWATCH:g}" height="{SWATCH:g}" '
            f'rx="2" {looks[name]}/>'
            f'<text x="{left + SWATCH + 6:g}" y="{top + FONT:g}">{escape(words)}</text>'
        )
        left += width + GAP
    return top + LINE


def _figures(seconds: float | None, whole_s: float) -> str:
    if seconds is None:
        return ""
    return f" {seconds:.3g} s, {seconds / whole_s:.1%}"
