"""How the time of an epoch depends on the nodes' links to the shared filesystem.

    python -m benchmarks.lab.links --out found --plot links.png

Four nodes of the lab train with an emulated step on a parallel filesystem, their links from a fifth
of what a step consumes to four times that. Nodes keep nothing of what they read from there, as
where data are far more than memory; `--cached` lets them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lab.cluster import Lab
from tests.lab.parallel_fs import start_parallel_fs
from tests.multirank import ROOT
from tonari.bench.storage.report.drawing import WAYS
from tonari.bench.storage.results.document import read_document
from tonari.bench.storage.results.results import EndToEnd, TrainingWay
from tonari.bench.storage.training.ways import later_s
from tonari.report.pictures import render
from tonari.report.tables import Table, markdown_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JOB = Path(__file__).with_name("links_on_nodes.py")
JOB_S = 900
NUM_NODES = 4
COLUMNS = (
    "link", "compute s", "beyond it: DataLoader", "staged", "exchange", "staging s",
    "prediction off: DataLoader", "staged", "exchange", "paid after, predicted and measured",
    "reads after staging",
)  # fmt: skip
RATIOS = (0.2, 0.5, 1.0, 2.0, 4.0)
STORAGE: Mapping[str, Any] = {
    "size_bytes": 4 << 20, "patterns": ["sequential_shard", "random_record", "checkpoint_burst"],
    "threads": [2], "clients": [NUM_NODES], "repeats": 3,
}  # fmt: skip
TRAINING: Mapping[str, Any] = {
    "step_s": 0.2, "batch_size": 8, "sample_bytes": 128 << 10, "num_samples": NUM_NODES * 8 * 24,
    "epochs": 4, "dataloader_epochs": 3, "ways": ["dataloader", "staged", "exchange"],
}  # fmt: skip
NAMES = {
    "dataloader": "DataLoader on the shared filesystem", "staged": "staged",
    "exchange": "staged, a tenth exchanged", "null": "samples in memory",
}  # fmt: skip


@dataclass(frozen=True)
class LinkCase:
    """What four nodes found at one rate of their links.

    Attributes:
        end_to_end: Of every way.
        reads: By way and epoch, of all nodes, as their clients counted them.
    """

    end_to_end: EndToEnd
    reads: Mapping[str, Sequence[int]]
    ways: Mapping[str, TrainingWay] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ways", {way.name: way for way in self.end_to_end.ways})

    @property
    def compute_s(self) -> float:
        """Of an epoch: its steps, at the pace that samples in memory allow."""
        return later_s(self.ways["null"].epoch_s)

    def beyond_s(self, way: str) -> float:
        """Of an epoch, what a way takes more than compute; its first is not counted."""
        return later_s(self.ways[way].epoch_s) - self.compute_s


def consumed_bytes_per_s(training: Mapping[str, Any]) -> float:
    """Say what a node consumes while it computes."""
    return float(training["batch_size"] * training["sample_bytes"] / training["step_s"])


def measure(
    directory: Path, ratio: float, training: Mapping[str, Any], *, cached: bool = False
) -> LinkCase:
    """Bring up a lab, give its links a rate, measure, and take it down.

    Args:
        directory: Of the lab; does not exist.
        ratio: Of a link's rate to what a node consumes.
        training: Of `PipelineOptions`.
        cached: Whether nodes keep what they read from the shared filesystem.
    """
    with Lab(directory, NUM_NODES) as lab:
        fs = start_parallel_fs(lab, cached=cached)
        lab.shape(f"{round(ratio * consumed_bytes_per_s(training) * 8)}bit")
        out = directory / "found"
        out.mkdir()
        command = [
            *lab.mpiexec(NUM_NODES), sys.executable, str(JOB), str(fs.path), str(lab.scratch),
            str(out), json.dumps({**STORAGE, "temperatures": ["cold", "warm"][: 1 + cached]}),
            json.dumps(training),
        ]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=JOB_S)
        if ended.returncode:
            raise RuntimeError(f"lab: {JOB.name} ended with {ended.returncode}: {ended.stderr}")
        of_ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(NUM_NODES)]
        reads = {
            way: [sum(epoch) for epoch in zip(*(of[way] for of in of_ranks), strict=True)]
            for way in of_ranks[0]
        }
        end_to_end = read_document(out / "found.json").end_to_end
    assert end_to_end is not None
    return LinkCase(end_to_end, reads)


def row(ratio: float, found: LinkCase) -> str:
    """Say what was found at one rate, as a row of a Markdown table."""
    ways = [found.ways[name] for name in ("dataloader", "staged", "exchange")]
    beyond = [found.beyond_s(way.name) for way in ways]
    off = [way.prediction_error_fraction or 0.0 for way in ways]
    staged = found.ways["staged"]
    cells = [
        f"{ratio:g}", f"{found.compute_s:.2f}", *(f"{seconds:+.2f}" for seconds in beyond),
        f"{staged.staging_s:.1f}", *(f"{error:+.1%}" for error in off),
        f"{staged.predicted_paid_after}, {staged.paid_after}",
        str(sum(found.reads["staged"]) + sum(found.reads["exchange"])),
    ]  # fmt: skip
    return markdown_row(cells)


def draw(sweep: Mapping[float, LinkCase]) -> "Callable[[Figure], None]":
    """Draw an epoch's time over the links' rate."""

    def onto(figure: "Figure") -> None:
        axes = figure.subplots()
        ratios = sorted(sweep)
        for way, name in NAMES.items():
            times = [later_s(sweep[ratio].ways[way].epoch_s) for ratio in ratios]
            axes.plot(
                ratios, times, marker="" if way == "null" else "o", color=WAYS[way], label=name,
                linestyle=":" if way == "null" else "-",
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
        axes.set(
            xlabel="a node's link, times what its steps consume", ylabel="seconds an epoch",
            title="An epoch on four nodes, by the rate of their links", ylim=(0, None),
        )  # fmt: skip
        axes.legend()

    return onto


def main() -> None:
    """Measure at every rate; print a table, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    sweep: dict[float, LinkCase] = {}
    print("\n".join(Table(COLUMNS, ()).markdown()))
    with tempfile.TemporaryDirectory() as directory:
        for number, ratio in enumerate(args.ratios):
            lab = Path(directory) / f"lab{number}"
            sweep[ratio] = measure(lab, ratio, TRAINING, cached=args.cached)
            print(row(ratio, sweep[ratio]), flush=True)
    if args.plot is not None:
        args.plot.write_bytes(render(draw(sweep), inches=(7, 4), kind="png"))


if __name__ == "__main__":
    main()
