"""`tonari demo`: what Tonari is for, on real images, in a few minutes on this machine."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tonari.demo.data import PackedImages, pack_digits, pack_source
from tonari.demo.report import (
    Run,
    Runs,
    final_accuracy,
    paired_difference,
    report_words,
    whole_s,
    write_page,
    write_png,
)
from tonari.mpi import mpiexec_command
from tonari.outputs import check_report

KINDS = ("dataloader", "tonari", "tonari_hiding")
SWEEP = (0.0, 1.0, 4.0)
TRIAL_EPOCHS, SWEEP_EPOCHS = 2, 8
RUN_LIMIT_S = 1200

Settings = dict[str, Any]
"""Of one run: `tonari.demo.run.RunSettings`."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small CNN on real images with torch's DataLoader, Tonari, and Tonari hiding rows.

    The images lie in tar shards in a directory that stands for a shared filesystem: its reads go
    through one token bucket. Several MPI ranks on this machine act as several nodes, each with a
    cache of its own. Some of the training labels are made wrong: there hiding rows pays.
    """

    data: str | None = None
    """Tar shards or Parquet with images and `cls`, in place of scikit-learn's digits."""
    samples: int = 6000
    """Samples to take from --data, at random; 0 takes all."""
    ranks: int = 4
    """MPI ranks to start."""
    nodes: int = 2
    """Nodes that the ranks stand for."""
    wrong_labels: float = 0.4
    """Fraction of the training labels that are made another class's; 0: labels as they are."""
    epochs: int = 24
    """Epochs of each run."""
    batch_size: int = 32
    """Rows a batch and rank."""
    exchange: float = 0.1
    """Fraction of its rows that each rank trades an epoch."""
    hide: float = 0.5
    """Largest fraction hidden: of each class by KeepAgreed; with --wrong-labels 0 by Kakurenbo."""
    lr: float = 0.1
    """Highest learning rate."""
    pfs_bandwidth: float = 1.0
    """MB/s that all ranks together can read from the shared directory; 0: no limit."""
    pfs_latency: float = 1.0
    """Milliseconds that each read of the shared directory takes; 0: none."""
    workers: tuple[int, ...] = (0, 2)
    """Numbers of DataLoader workers to try; the fastest is compared."""
    seeds: int = 1
    """Runs with different seeds; more than one adds the paired difference in accuracy."""
    sweep: bool = False
    """Repeat at 0 (no limit, no delay) and 4 times the bandwidth: where does it stop paying?"""
    output: Path = Path("tonari-demo.html")
    """Where the report goes: a page that needs nothing else; its plots alone if it ends in .png."""
    json: bool = False
    """Print one JSON document and nothing else on stdout."""
    keep: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Work in this directory and keep it, in place of a temporary one."""

    def __post_init__(self) -> None:
        for name in ("ranks", "nodes", "epochs", "batch_size", "seeds"):
            if getattr(self, name) < 1:
                raise SystemExit(f"tonari demo: --{name.replace('_', '-')} must be at least 1")
        for name in ("wrong_labels", "hide"):
            if not 0 <= getattr(self, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise SystemExit(f"tonari demo: {flag} must be at least 0 and less than 1")
        check_report("--output", self.output)
        if self.ranks % self.nodes:
            raise SystemExit(
                f"tonari demo: {self.ranks} ranks do not spread evenly over {self.nodes} nodes; "
                f"choose --ranks as a multiple of --nodes"
            )


@dataclass(frozen=True)
class Show:
    """Where progress goes: stderr, and nowhere with --json."""

    console: Console
    progress: Progress


def main(argv: list[str]) -> int:
    """Run the command."""
    options = tyro.cli(Demo, args=argv, prog="tonari demo")
    console = Console(stderr=True, quiet=options.json)
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with (
        _directory(options.keep) as work,
        Progress(*columns, console=console, disable=options.json) as progress,
    ):
        show = Show(console, progress)
        console.print(f"packing {options.data or 'handwritten digits'} as WebDataset shards")
        packed = _pack(options, work / "shared")
        bandwidths = [factor * options.pfs_bandwidth for factor in SWEEP]
        others = [mb for mb in bandwidths if mb != options.pfs_bandwidth] if options.sweep else []
        runs = _three_runs(options, packed, work, show)
        swept = {options.pfs_bandwidth: runs}
        for bandwidth in others:
            # 0 is the other extreme, a disk of this machine: no delay either.
            latency = options.pfs_latency if bandwidth else 0.0
            epochs = min(options.epochs, SWEEP_EPOCHS)
            other = replace(options, pfs_bandwidth=bandwidth, pfs_latency=latency, epochs=epochs)
            swept[bandwidth] = _three_runs(other, packed, work, show)
        seeds = [runs]
        for seed in range(1, options.seeds):
            # Accuracy does not depend on the bandwidth: the other seeds need not wait for it.
            fast = replace(options, pfs_bandwidth=0.0, pfs_latency=0.0)
            seeds.append(_three_runs(fast, packed, work, show, seed=seed))
    _report(options, packed, runs, swept, seeds)
    return 0


def _report(
    options: Demo, packed: PackedImages, runs: Runs, swept: dict[float, Runs], seeds: list[Runs]
) -> None:
    settings = {k: v for k, v in asdict(options).items() if k not in ("json", "output", "keep")}
    if not options.json:
        print(report_words(seeds, swept, _data(options, packed)))
        _write(options, packed, swept, seeds, settings)
        print(f"report: {options.output}")
        return
    document: dict[str, object] = {
        "runs": runs,
        "world": {"ranks": options.ranks, "nodes": options.nodes},
        "data": {
            "samples": packed.num_train,
            "test_samples": packed.num_test,
            "tar_bytes": packed.tar_bytes,
        },
        "settings": settings,
    }
    if options.sweep:
        document["sweep"] = {str(bandwidth): found for bandwidth, found in sorted(swept.items())}
    if options.seeds > 1:
        document["seeds"] = {
            kind: asdict(paired_difference(seeds, kind)) for kind in KINDS if kind != "dataloader"
        }
    print(json.dumps(document))
    _write(options, packed, swept, seeds, settings)


def _write(
    options: Demo, packed: PackedImages, swept: dict[float, Runs], seeds: list[Runs],
    settings: dict[str, object],
) -> None:  # fmt: skip
    """Write the report, once the figures are on the terminal: a disk may be full."""
    if options.output.suffix == ".png":
        write_png(options.output, seeds[0])
    else:
        data = (
            f"{options.data or 'handwritten digits'}: {_data(options, packed)}; "
            f"{options.ranks} ranks on {options.nodes} nodes that share this machine"
        )
        words = [(name.replace("_", " "), str(value)) for name, value in settings.items()]
        write_page(options.output, seeds, swept, data, words)


def _data(options: Demo, packed: PackedImages) -> str:
    return (
        f"{packed.num_train:,} rows to train on, {options.wrong_labels:.0%} of their labels wrong; "
        f"{packed.tar_bytes / 1e6:.1f} MB of tar shards"
    )


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise SystemExit(f"tonari demo: --keep {keep} is not empty; name a new directory")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tonari-demo-") as name:
        yield Path(name)


def _pack(options: Demo, shared: Path) -> PackedImages:
    if options.data is None:
        return pack_digits(shared, wrong_labels=options.wrong_labels)
    return pack_source(
        options.data, shared, max_samples=options.samples, wrong_labels=options.wrong_labels
    )


def _three_runs(
    options: Demo, packed: PackedImages, work: Path, show: Show, *, seed: int = 0
) -> Runs:
    """The baseline in the better of two settings, then Tonari, then Tonari that hides."""

    def settings(kind: str, num_workers: int = 0, epochs: int = options.epochs) -> Settings:
        return _settings(
            options, packed, work, kind=kind, num_workers=num_workers, epochs=epochs, seed=seed
        )

    best = options.workers[0]
    # Accuracy does not depend on the workers, and further seeds are run for it alone.
    if seed == 0 and len(options.workers) > 1:
        epochs = min(TRIAL_EPOCHS, options.epochs)
        tries = _start(options, [settings("dataloader", n, epochs) for n in options.workers], show)
        walls = [whole_s(each, options.epochs) for each in tries]
        best = options.workers[walls.index(min(walls))]
    dataloader, tonari, hiding, fewer = _start(
        options,
        [
            settings("dataloader", best), settings("tonari"), settings("tonari_hiding"),
            # The cheapest control: wrong labels are learned late, so few epochs of all rows.
            settings("tonari", epochs=max(options.epochs // 3, 1)),
        ],
        show,
    )  # fmt: skip
    return {
        "dataloader": {**dataloader, "num_workers": best},
        "tonari": tonari,
        "tonari_hiding": {**hiding, "fewer_epochs": final_accuracy(fewer)},
    }


def _settings(
    options: Demo, packed: PackedImages, work: Path, *, kind: str, num_workers: int, epochs: int,
    seed: int,
) -> Settings:  # fmt: skip
    own = tempfile.mkdtemp(prefix=f"{kind}-", dir=work)
    return {
        "kind": kind,
        "shared": str(packed.directory),
        "train_shards": packed.train_shards,
        "test_shards": packed.test_shards,
        "extension": packed.extension,
        "image_shape": packed.image_shape,
        "num_classes": packed.num_classes,
        "num_train": packed.num_train,
        "wrong": packed.wrong,
        "cache": f"{own}/cache",
        "throttle_path": f"{own}/bucket",
        "pfs_bandwidth": options.pfs_bandwidth * 1e6,
        "pfs_latency_s": options.pfs_latency / 1e3,
        "epochs": epochs,
        "batch_size": options.batch_size,
        "exchange": options.exchange,
        "hide": options.hide,
        "num_workers": num_workers,
        "seed": seed,
        "lr": options.lr,
    }


def _start(options: Demo, runs: list[Settings], show: Show) -> list[Run]:
    """Start the ranks that do runs one after the other; follow them, and read what rank 0 wrote."""
    from tonari.demo.run import PROGRESS

    work = Path(tempfile.mkdtemp(prefix="ranks-", dir=Path(str(runs[0]["cache"])).parents[1]))
    (work / "settings.json").write_text(json.dumps(runs))
    command = [
        *mpiexec_command(options.ranks), sys.executable, "-m", "tonari.demo.run",
        str(work / "settings.json"), str(work / "records.json"),
    ]  # fmt: skip
    environment = os.environ | {
        "TONARI_RANKS_PER_NODE": str(options.ranks // options.nodes),
        "OMP_NUM_THREADS": "1",
    }
    note = _noter(show.progress, runs)
    with (
        (work / "ranks.log").open("w+") as log,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        assert process.stdout is not None
        # Ranks have time limits of their own; this one is for what hangs before or beside them.
        limit = threading.Timer(RUN_LIMIT_S * len(runs), process.terminate)
        limit.start()
        try:
            for line in process.stdout:
                if line.startswith(PROGRESS):
                    note(line)
                else:
                    log.write(line)
            status = process.wait()
        finally:
            limit.cancel()
            process.terminate()
        log.seek(0)
        output = log.read()[-4000:]
    if status:
        kinds = ", ".join(dict.fromkeys(str(run["kind"]) for run in runs))
        raise SystemExit(f"tonari demo: the runs {kinds} failed with status {status}:\n{output}")
    records: list[Run] = json.loads((work / "records.json").read_text())
    return records


def _noter(progress: Progress, runs: list[Settings]) -> Callable[[str], None]:
    """Show a bar for each run, which begins when the one before it ends."""
    tasks: list[TaskID] = []
    for run in runs:
        label = str(run["kind"]).replace("_", ", ")
        label += f" ({run['num_workers']} workers)" if run["kind"] == "dataloader" else ""
        label += f", {run['pfs_bandwidth'] / 1e6:g} MB/s"
        label += f", seed {run['seed']}" if run["seed"] else ""
        tasks.append(progress.add_task(label, total=run["epochs"], note="", start=not tasks))

    def note(line: str) -> None:
        _, done, seconds, accuracy = line.split()
        words = f"{float(seconds):.2f} s, {float(accuracy):.1%} right"
        progress.update(tasks[0], completed=int(done), note=words)
        if int(done) == runs[-len(tasks)]["epochs"] and tasks[1:]:
            del tasks[0]
            progress.start_task(tasks[0])

    return note
