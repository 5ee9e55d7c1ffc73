"""What the demo found: a table, a picture, and a sentence that says what was gained."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.student import reach_of_mean

Run = dict[str, list[float] | float]
Runs = dict[str, Run]

NAMES = {
    "dataloader": "DataLoader",
    "tonari": "Tonari",
    "tonari_hiding": "Tonari, hiding",
}
COLOURS = {"dataloader": "#7f7f7f", "tonari": "#1f77b4", "tonari_hiding": "#2ca02c"}
LAST_EPOCHS = 3


@dataclass(frozen=True)
class Difference:
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


def final_accuracy(run: Run) -> float:
    """Mean test accuracy of the last epochs, in [0, 1]."""
    last = listed(run, "test_accuracy")[-LAST_EPOCHS:]
    return sum(last) / len(last)


def paired_difference(seeds: Sequence[Runs], kind: str) -> Difference:
    """Compare a kind of run with the baseline, seed by seed."""
    gaps = [
        100 * (final_accuracy(runs[kind]) - final_accuracy(runs["dataloader"])) for runs in seeds
    ]
    mean, reach = sum(gaps) / len(gaps), reach_of_mean(gaps)
    if reach is None:
        return Difference(mean, None, None, len(gaps))
    return Difference(mean, mean - reach, mean + reach, len(gaps))


def print_report(out: Console, runs: Runs, tar_bytes: int) -> None:
    """Print the table and the sentence."""
    table = Table(title=f"{tar_bytes / 1e6:.1f} MB of tar shards", title_justify="left")
    table.add_column("")
    for kind in runs:
        table.add_column(NAMES[kind], justify="right")

    def row(name: str, cell: Callable[[Run], str]) -> None:
        table.add_row(name, *(cell(run) for run in runs.values()))

    row("staging, once", lambda r: f"{r['staging_s']:.2f} s" if r["staging_s"] else "-")
    row("first epoch", lambda r: f"{listed(r, 'epoch_s')[0]:.2f} s")
    row("later epochs, each", lambda r: f"{later_mean(r, 'epoch_s'):.2f} s")
    row("  of it waiting for data", lambda r: f"{later_mean(r, 'wait_s'):.2f} s")
    row("accuracy, last 3 epochs", lambda r: f"{final_accuracy(r):.1%}")
    row("shared directory, first epoch", lambda r: f"{listed(r, 'source_bytes')[0] / 1e6:.2f} MB")
    row("shared directory, later epochs", lambda r: f"{later_mean(r, 'source_bytes') / 1e6:.2f} MB")
    row("rows exchanged an epoch", lambda r: f"{later_mean(r, 'exchanged_rows'):.0f}")
    row("rows hidden", lambda r: f"{later_mean(r, 'hidden_fraction'):.0%}")
    if "num_workers" in runs["dataloader"]:
        table.caption = (
            f"DataLoader with {runs['dataloader']['num_workers']} workers, the best of those tried"
        )
    out.print(table)
    out.print(sentence(runs))


def sentence(runs: Runs) -> str:
    """Say what was gained, or that nothing was."""
    base, ours = runs["dataloader"], runs["tonari"]
    ratio = later_mean(base, "epoch_s") / later_mean(ours, "epoch_s")
    points = 100 * (final_accuracy(ours) - final_accuracy(base))
    accuracy = f"accuracy {points:+.1f} points"
    paid = _paid_epoch(base, ours)
    if ratio <= 1.05:
        return (
            f"Nothing was gained: later epochs take {1 / ratio:.2f} times the DataLoader's time "
            f"({accuracy}); the shared directory is fast enough here."
        )
    when = f"staging had paid after {_epochs(paid)}" if paid else "staging had not paid by the end"
    faster = later_mean(ours, "epoch_s") / later_mean(runs["tonari_hiding"], "epoch_s")
    hiding = (
        f"hiding easy rows makes them another {faster:.2f} times shorter"
        if faster > 1
        else f"hiding easy rows saved no time here ({faster:.2f} times)"
    )
    return (
        f"Gained: later epochs are {ratio:.1f} times shorter than the DataLoader's and read "
        f"nothing from the shared directory ({accuracy}); {when}; {hiding}."
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


def print_sweep(out: Console, swept: dict[float, Runs]) -> None:
    """Print how the gain depends on the shared directory's bandwidth."""
    table = Table(title="where it pays", title_justify="left")
    for name in ("shared directory", "DataLoader", "Tonari", "times shorter", "staging paid after"):
        table.add_column(name, justify="right")
    for bandwidth, runs in sorted(swept.items(), key=lambda item: item[0] or math.inf):
        base, ours = (later_mean(runs[kind], "epoch_s") for kind in ("dataloader", "tonari"))
        paid = _paid_epoch(runs["dataloader"], runs["tonari"])
        table.add_row(
            f"{bandwidth:g} MB/s" if bandwidth else "no limit, no delay",
            f"{base:.2f} s",
            f"{ours:.2f} s",
            f"{base / ours:.2f}",
            _epochs(paid) if paid else "never",
        )
    out.print(table)


def print_seeds(out: Console, seeds: Sequence[Runs]) -> None:
    """Print accuracy differences paired by seed."""
    for kind in ("tonari", "tonari_hiding"):
        found = paired_difference(seeds, kind)
        out.print(
            f"{NAMES[kind]}: accuracy {found.mean_points:+.2f} points against the DataLoader over "
            f"{found.num_seeds} seeds, 95 % interval [{found.low_points:+.2f}, "
            f"{found.high_points:+.2f}]"
        )


def draw(runs: Runs, path: Path) -> None:
    """Draw epoch time, accuracy against time, and bytes read, as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (times, accuracy, read) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for place, (kind, run) in enumerate(runs.items()):
        epoch_s, wait_s = later_mean(run, "epoch_s"), later_mean(run, "wait_s")
        times.bar(place, epoch_s - wait_s, color=COLOURS[kind])
        times.bar(
            place, wait_s, bottom=epoch_s - wait_s, color=COLOURS[kind], alpha=0.4, hatch="//"
        )
        staging = run["staging_s"]
        assert not isinstance(staging, list)
        clock, clocks = staging, []
        for seconds in listed(run, "epoch_s"):
            clock += seconds
            clocks.append(clock)
        right = [100 * value for value in listed(run, "test_accuracy")]
        accuracy.plot(clocks, right, marker="o", color=COLOURS[kind], label=NAMES[kind])
        total = [sum(listed(run, "source_bytes")[: n + 1]) / 1e6 for n in range(len(clocks))]
        read.plot(
            range(1, len(clocks) + 1), total, marker="o", color=COLOURS[kind], label=NAMES[kind]
        )
    times.set_xticks(range(len(runs)), [NAMES[kind] for kind in runs])
    times.set(title="a later epoch (hatched: waiting for data)", ylabel="seconds")
    accuracy.set(
        title="accuracy against time, staging included", xlabel="seconds", ylabel="test accuracy, %"
    )
    read.set(title="read from the shared directory", xlabel="epoch", ylabel="MB in total")
    accuracy.legend()
    read.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    plt.close(figure)
