"""What the demo found: a sentence about what was gained, a table, plots, and a page of all."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from tonari.report.pages import lay_out, picture
from tonari.report.pictures import COLOURS, write_picture
from tonari.report.student import reach_of_mean
from tonari.report.tables import UNKNOWN, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Run = dict[str, list[float] | float]
Runs = dict[str, Run]
Pairs = Sequence[tuple[str, str]]

NAMES = {
    "dataloader": "DataLoader",
    "tonari": "Tonari",
    "tonari_hiding": "Tonari, hiding",
}
COLOURS_OF = dict(zip(NAMES, COLOURS[:3], strict=True))
LAST_EPOCHS = 3


@dataclass(frozen=True)
class MeanDifference:
    """Accuracy of a run less the baseline's, paired by seed: mean of the last epochs, in points.

    ``low`` and ``high`` bound the mean with 95 % confidence (Student's t); None with fewer than two
    seeds.
    """

    mean_points: float
    low_points: float | None
    high_points: float | None
    num_seeds: int


def listed(run: Run, name: str) -> list[float]:
    """A figure of every epoch."""
    values = run[name]
    assert isinstance(values, list)
    return values


def later_mean(run: Run, name: str) -> float:
    """Mean over the epochs after the first, which includes one-off costs."""
    values = listed(run, name)
    later = values[1:] or values
    return sum(later) / len(later)


def whole_s(run: Run, num_epochs: int) -> float:
    """Say how long so many epochs take: workers start in the first one."""
    return listed(run, "epoch_s")[0] + (num_epochs - 1) * later_mean(run, "epoch_s")


def final_accuracy(run: Run) -> float:
    """Mean test accuracy of the last epochs, in [0, 1]."""
    last = listed(run, "test_accuracy")[-LAST_EPOCHS:]
    return sum(last) / len(last)


def paired_difference(seeds: Sequence[Runs], kind: str) -> MeanDifference:
    """Compare a kind of run with the baseline, seed by seed."""
    gaps = [
        100 * (final_accuracy(runs[kind]) - final_accuracy(runs["dataloader"])) for runs in seeds
    ]
    mean, reach = sum(gaps) / len(gaps), reach_of_mean(gaps)
    if reach is None:
        return MeanDifference(mean, None, None, len(gaps))
    return MeanDifference(mean, mean - reach, mean + reach, len(gaps))


def table(runs: Runs, title: str) -> Table:
    """Lay out each figure of every run."""

    def row(name: str, cell: Callable[[Run], str]) -> list[str]:
        return [name, *(cell(run) for run in runs.values())]

    def megabytes(value: float) -> str:
        return f"{value / 1e6:.2f} MB"

    rows = [
        row("staging, once", lambda r: f"{r['staging_s']:.2f} s" if r["staging_s"] else UNKNOWN),
        row("first epoch", lambda r: f"{listed(r, 'epoch_s')[0]:.2f} s"),
        row("later epochs, each", lambda r: f"{later_mean(r, 'epoch_s'):.2f} s"),
        row("waiting for data in each", lambda r: f"{later_mean(r, 'wait_s'):.2f} s"),
        row("accuracy, last 3 epochs", lambda r: f"{final_accuracy(r):.1%}"),
        row("shared directory, all epochs", lambda r: megabytes(sum(listed(r, "source_bytes")))),
        row("shared directory, later epochs", lambda r: megabytes(later_mean(r, "source_bytes"))),
        row("rows exchanged an epoch", lambda r: f"{later_mean(r, 'exchanged_rows'):.0f}"),
        row("rows hidden", lambda r: f"{later_mean(r, 'hidden_fraction'):.0%}"),
        row(
            "of the hidden, labels wrong",
            lambda r: f"{share:.0%}" if (share := wrong_share(r)) else UNKNOWN,
        ),
    ]
    return Table(["", *(NAMES[kind] for kind in runs)], rows, title)


def wrong_share(run: Run) -> float:
    """Say which share of all rows that were hidden has a wrong label, in [0, 1]; 0 if none was."""
    hidden = listed(run, "hidden_fraction")
    wrong = zip(hidden, listed(run, "hidden_wrong_fraction"), strict=True)
    return sum(part * share for part, share in wrong) / sum(hidden) if sum(hidden) else 0.0


def caption(runs: Runs) -> str:
    """Name the baseline's setting."""
    return f"DataLoader with {runs['dataloader']['num_workers']} workers, the best of those tried"


def report_words(seeds: Sequence[Runs], swept: dict[float, Runs], data: str) -> str:
    """Write the tables and the sentences."""
    runs = seeds[0]
    lines = table(runs, data).text()
    lines += [f"  {caption(runs)}", "", sentence(runs)]
    if len(swept) > 1:
        lines += ["", *sweep_table(swept).text()]
    if len(seeds) > 1:
        lines += ["", *seed_sentences(seeds)]
    return "\n".join(lines)


def sentence(runs: Runs) -> str:
    """Describe what was gained, or that nothing was."""
    base, ours = runs["dataloader"], runs["tonari"]
    ratio = later_mean(base, "epoch_s") / later_mean(ours, "epoch_s")
    points = 100 * (final_accuracy(ours) - final_accuracy(base))
    accuracy = f"accuracy {points:+.1f} points"
    paid = _paid_epoch(base, ours)
    hiding = _hiding(ours, runs["tonari_hiding"])
    if ratio <= 1.05:
        return (
            f"Nothing was gained by staging: later epochs take {1 / ratio:.2f} times the "
            f"DataLoader's time ({accuracy}); the shared directory is fast enough here; {hiding}."
        )
    when = f"staging had paid after {_epochs(paid)}" if paid else "staging had not paid by the end"
    return (
        f"Gained: later epochs are {ratio:.1f} times shorter than the DataLoader's and read "
        f"nothing from the shared directory ({accuracy}); {when}; {hiding}."
    )


def _hiding(ours: Run, hides: Run) -> str:
    hidden = later_mean(hides, "hidden_fraction")
    faster = later_mean(ours, "epoch_s") / later_mean(hides, "epoch_s")
    points = 100 * (final_accuracy(hides) - final_accuracy(ours))
    fewer = hides["fewer_epochs"]
    assert not isinstance(fewer, list)
    beside = 100 * (final_accuracy(hides) - fewer)
    time = f"makes them {faster:.2f} times shorter" if faster > 1.05 else "saves no time here"
    return (
        f"hiding {hidden:.0%} of the rows {time} ({points:+.1f} points beside hiding none, "
        f"{beside:+.1f} beside a third of the epochs)"
    )


def _epochs(count: int) -> str:
    return f"{count} epoch" if count == 1 else f"{count} epochs"


def _paid_epoch(base: Run, ours: Run) -> int | None:
    """Epochs after which staging and training together took less time than the baseline."""
    staged = ours["staging_s"]
    assert not isinstance(staged, list)
    ahead = -staged
    for done, (theirs, mine) in enumerate(
        zip(listed(base, "epoch_s"), listed(ours, "epoch_s"), strict=True), start=1
    ):
        ahead += theirs - mine
        if ahead > 0:
            return done
    return None


SWEEP_COLUMNS = ("shared directory", "DataLoader", "Tonari", "times shorter", "staging paid after")


def sweep_table(swept: dict[float, Runs]) -> Table:
    """Put the gain beside the shared directory's bandwidth, the slowest first."""
    rows = []
    for bandwidth, runs in sorted(swept.items(), key=lambda item: item[0] or math.inf):
        base, ours = (later_mean(runs[kind], "epoch_s") for kind in ("dataloader", "tonari"))
        paid = _paid_epoch(runs["dataloader"], runs["tonari"])
        rows.append([
            f"{bandwidth:g} MB/s" if bandwidth else "no limit, no delay",
            f"{base:.2f} s",
            f"{ours:.2f} s",
            f"{base / ours:.2f}",
            _epochs(paid) if paid else "never",
        ])  # fmt: skip
    return Table(SWEEP_COLUMNS, rows, "Where it pays")


def seed_sentences(seeds: Sequence[Runs]) -> list[str]:
    """Give the differences in accuracy, paired by seed."""
    found = []
    for kind in ("tonari", "tonari_hiding"):
        gap = paired_difference(seeds, kind)
        found.append(
            f"{NAMES[kind]}: accuracy {gap.mean_points:+.2f} points against the DataLoader over "
            f"{gap.num_seeds} seeds, 95 % interval [{gap.low_points:+.2f}, {gap.high_points:+.2f}]"
        )
    return found


def draw_times(figure: "Figure", runs: Runs) -> None:
    """Draw a later epoch of each, and its waits."""
    axes = figure.subplots()
    for place, (kind, run) in enumerate(runs.items()):
        epoch_s, wait_s = later_mean(run, "epoch_s"), later_mean(run, "wait_s")
        computing_s, colour = epoch_s - wait_s, COLOURS_OF[kind]
        axes.bar(place, computing_s, color=colour)
        axes.bar(place, wait_s, bottom=computing_s, color=colour, alpha=0.4, hatch="//")
    axes.set_xticks(range(len(runs)), [NAMES[kind] for kind in runs])
    axes.set_ylabel("seconds")


def draw_accuracy(figure: "Figure", runs: Runs) -> None:
    """Draw test accuracy against the time trained so far, with staging."""
    axes = figure.subplots()
    for kind, run in runs.items():
        staging = run["staging_s"]
        assert not isinstance(staging, list)
        clocks = [staging + passed for passed in accumulate(listed(run, "epoch_s"))]
        right = [100 * value for value in listed(run, "test_accuracy")]
        axes.plot(clocks, right, marker="o", color=COLOURS_OF[kind], label=NAMES[kind])
    axes.set(xlabel="seconds", ylabel="test accuracy, %")
    axes.legend()


def draw_reads(figure: "Figure", runs: Runs) -> None:
    """Draw what was read from the shared directory so far, epoch by epoch."""
    axes = figure.subplots()
    for kind, run in runs.items():
        total = [read / 1e6 for read in accumulate(listed(run, "source_bytes"))]
        epochs = range(1, len(total) + 1)
        axes.plot(epochs, total, marker="o", color=COLOURS_OF[kind], label=NAMES[kind])
    axes.set(xlabel="epoch", ylabel="MB in total")
    axes.set_ylim(bottom=0)
    axes.legend()


PLOTS = (
    ("A later epoch", "Hatched: waiting for data.", draw_times),
    ("Accuracy against time", "The staging before the first epoch is counted.", draw_accuracy),
    ("Read from the shared directory", "By all ranks together.", draw_reads),
)
"""Titles, captions and how they are drawn."""


def write_page(
    path: Path, seeds: Sequence[Runs], swept: dict[float, Runs], data: str, settings: Pairs
) -> None:
    """Write the report as one page; needs the `report` extra.

    Args:
        path: The file.
        seeds: The runs of each seed; the first is shown whole.
        swept: Runs by bandwidth; one: there is no sweep.
        data: What was trained on, in words.
        settings: Of the demo, in words.
    """
    runs = seeds[0]
    answer, *rest = sentence(runs).split("; ")
    path.write_text(
        lay_out(
            Path(__file__).with_suffix(".jinja"),
            findings=[f"{part[0].upper()}{part[1:].rstrip('.')}." for part in (answer, *rest)],
            data=data,
            table=table(runs, "The figures"),
            caption=caption(runs),
            plots=[
                picture(title, words, partial(draw, runs=runs), (5.4, 3.8))
                for title, words, draw in PLOTS
            ],
            sweep=sweep_table(swept) if len(swept) > 1 else None,
            seeds=seed_sentences(seeds) if len(seeds) > 1 else [],
            settings=settings,
        )
    )


def write_png(path: Path, runs: Runs) -> None:
    """Draw all plots side by side."""

    def draw(figure: "Figure") -> None:
        for part, (title, words, draw_one) in zip(
            figure.subfigures(1, len(PLOTS), squeeze=False).flat, PLOTS, strict=True
        ):
            part.suptitle(f"{title}\n{words}", fontsize=11)
            draw_one(part, runs)

    write_picture(path, draw, inches=(15, 4.2))
