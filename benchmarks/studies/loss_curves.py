"""Draw the losses of runs of `tonari train`, beside each other, from what they left.

    python -m benchmarks.studies.loss_curves NAME=RUN_DIRECTORY ... --plot curves.png

Prints a line a run: steps, hidden share of the last epoch, last training and evaluation loss.
"""

import argparse
import json
from pathlib import Path

Line = dict[str, float]


def read_lines(directory: Path, kind: str) -> list[Line]:
    """Read a run's lines of one kind, ``"step"`` or ``"epoch"``."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def summary(name: str, directory: Path) -> str:
    """Say how a run ended."""
    last = read_lines(directory, "epoch")[-1]
    told = ("loss", "evaluation_loss", "accuracy", "hidden_fraction")
    figures = [f"{figure} {last[figure]:.3f}" for figure in told if last.get(figure) is not None]
    return f"{name}: {last['step']} steps, {', '.join(figures)}"


def plot(runs: dict[str, Path], path: Path) -> None:
    """Draw training losses as lines and evaluations as points, over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, directory) in enumerate(runs.items()):
        steps, epochs = read_lines(directory, "step"), read_lines(directory, "epoch")
        colour = f"C{number}"
        axes.plot(
            [line["step"] for line in steps], [line["loss"] for line in steps],
            color=colour, linewidth=1.2, label=name,
        )  # fmt: skip
        scored = [line for line in epochs if line["evaluation_loss"] is not None]
        axes.plot(
            [line["step"] for line in scored], [line["evaluation_loss"] for line in scored],
            "o", color=colour, markersize=5, label=f"{name}, evaluation",
        )  # fmt: skip
    axes.set(xlabel="steps", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_figure(path, dpi=120)


def main() -> None:
    """Print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="NAME=DIRECTORY")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    runs = {name: Path(path) for name, _, path in (run.partition("=") for run in args.runs)}
    for name, directory in runs.items():
        print(summary(name, directory))
    if args.plot is not None:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
