"""`tonari bench`: other loaders and the machine's limits beside ours; exchange; importance."""

import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from dataio.base.filesystem import cache_directory
from tonari.bench.compare import Compare, bench_compare
from tonari.bench.exchange.command import Exchange, bench_exchange
from tonari.bench.importance.command import BenchImportance, bench_importance
from tonari.bench.io import IO, bench_io
from tonari.bench.loader.contenders import CONTENDERS, Contender
from tonari.bench.loader.environments import install
from tonari.bench.loader.figures import LoaderJob, LoaderRecord, LoaderSettings
from tonari.bench.loader.loader import measure_loaders
from tonari.bench.loader.report import draw, inches, records_csv, table, to_json
from tonari.bench.loader.sets import SETS
from tonari.bench.notify import notify_on_stderr
from tonari.bench.outputs import ResultOutputs
from tonari.report.pictures import write_picture
from tonari.terminal import list_commands

PEERS = "bench-peers"


@dataclass(frozen=True, kw_only=True)
class BenchLoader:
    """Measure samples/s of shuffled epochs: ours, other loaders, and what no loader can pass.

    Every contender gets each set in its own form, in the settings that it recommends for itself,
    and proves in its first epoch that every sample came once and whole. They run one after
    the other, an epoch each, in rounds; what is printed are medians, and of ratios the median of
    ratios within a round.

    tonari-exchanged is ours on a cache whose rows ten epochs of exchange have scattered, which is
    what a long job reads; tonari is ours freshly staged. limit-gather is NumPy alone, limit-decode
    the JPEG decoder alone. "spread" is the variance of ids within a batch over that of the set: 1
    is a full shuffle. A contender that loses or repeats a sample is marked WRONG and is nobody's
    best peer.

    First `tonari bench loader --install`, once, for the peers that need packages of their own; then
    `tonari bench loader --sets 3k --scale 0.2` for an impression in minutes.

    Exit status: 0; 1 if ours failed, or lost or repeated a sample.
    """

    sets: tuple[Literal["1k", "3k", "jpeg", "imagenet", "photos", "48k", "8m"], ...] = (
        "1k", "3k", "jpeg", "imagenet", "photos", "48k", "8m",
    )  # fmt: skip
    """200k x 1 KiB, 50k x 3 KiB, 20k JPEG of 256 px, random crops of 2k photos of
    500 x 400 and of 128 of 3000 x 2000, 20k x 48 KiB, 64 x 8 MiB."""
    scale: float = 1.0
    """Part of each set's samples to take, in (0, 1]."""
    contenders: tuple[str, ...] = ()
    """Only these, by name: all, unless given."""
    settings: tyro.conf.OmitArgPrefixes[LoaderSettings] = field(default_factory=LoaderSettings)
    directory: Path | None = None
    """For the sets and every loader's form of them (a few times the set, on a local disk), kept for
    the next run. Defaults to a temporary one, which is removed."""
    environments: Path | None = None
    """Where the peers' environments are. Defaults to bench-peers in the cache directory."""
    install: bool = False
    """Make the environments that are absent, with pip, and end."""
    outputs: tyro.conf.OmitArgPrefixes[ResultOutputs] = field(default_factory=ResultOutputs)

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise ValueError(f"--scale is {self.scale}, must be in (0, 1]")
        of = self.settings
        if of.repeats < 1:
            raise ValueError(f"--repeats is {of.repeats}, must be >= 1")
        if min(of.ranks, default=0) < 1 or min(of.workers, default=-1) < 0:
            raise ValueError("--ranks must be numbers >= 1, and --workers numbers >= 0")
        known = {contender.name for contender in CONTENDERS}
        if unknown := sorted(set(self.contenders) - known):
            raise ValueError(
                f"--contenders {unknown[0]}: expected some of {', '.join(sorted(known))}"
            )

    def chosen(self) -> list[Contender]:
        """Pick the contenders that were named."""
        return [c for c in CONTENDERS if not self.contenders or c.name in self.contenders]


Options = IO | Compare | BenchLoader | Exchange | BenchImportance
COMMANDS: dict[str, tuple[type[Options], str]] = {
    "io": (IO, "what a shared filesystem costs training, beside the node's disk and the network"),
    "compare": (Compare, "two results of bench io: has a filesystem become slower?"),
    "loader": (BenchLoader, "samples a second, beside other loaders and the machine's limits"),
    "exchange": (Exchange, "what an epoch takes while rows travel between nodes"),
    "importance": (BenchImportance, "what choosing rows and reporting losses costs"),
}


def main(argv: list[str]) -> int:
    """Run the command."""
    name, *rest = argv or [""]
    if name not in COMMANDS:
        is_asked = name in ("-h", "--help")
        words = {name: words for name, (_, words) in COMMANDS.items()}
        lines = list_commands("tonari bench", "Measures parts of Tonari on this machine.", words)
        if name and not is_asked:
            lines = [f"tonari bench: {name!r} is not a command, expected one of {', '.join(words)}"]
        print("\n".join(lines), file=sys.stdout if is_asked else sys.stderr)
        return 0 if is_asked else 2
    options: Options = tyro.cli(COMMANDS[name][0], args=rest, prog=f"tonari bench {name}")
    if isinstance(options, Exchange):
        return bench_exchange(options)
    if isinstance(options, BenchImportance):
        return bench_importance(options)
    if isinstance(options, IO):
        return bench_io(options)
    if isinstance(options, Compare):
        return bench_compare(options)
    root = options.environments or cache_directory("auto") / PEERS
    if options.install:
        return _install(options, root)
    options.outputs.check()
    return _bench(options, root)


def _install(options: BenchLoader, root: Path) -> int:
    root.mkdir(parents=True, exist_ok=True)
    for contender in options.chosen():
        if contender.environment:
            notify_on_stderr(f"installing {contender.name} in {root / contender.environment}")
            install(contender, root)
    return 0


def _bench(options: BenchLoader, root: Path) -> int:
    directory = options.directory or Path(tempfile.mkdtemp(prefix="tonari-bench-"))
    directory.mkdir(parents=True, exist_ok=True)
    job = LoaderJob(
        settings=options.settings,
        sets=[SETS[name].scaled(options.scale) for name in options.sets],
        contenders=options.chosen(),
        directory=directory.absolute(),
        environments=root.absolute(),
        keep=options.directory is not None,
    )
    records: list[LoaderRecord] = []
    try:
        for record in measure_loaders(job, notify_on_stderr):
            records.append(record)
    finally:
        # An interrupted run keeps the cases that it finished.
        _write(options.outputs, job, records)
        if options.directory is None:
            shutil.rmtree(directory, ignore_errors=True)
    wrong = [r for r in records if r.kind == "ours" and (r.problem or not r.is_exact)]
    for record in wrong:
        what = record.problem or "samples were lost, repeated or exchanged; see the table"
        sys.stderr.write(f"tonari bench: {record.set_name}, {record.contender}: {what}\n")
    return 1 if wrong else 0


def _write(files: ResultOutputs, job: LoaderJob, records: list[LoaderRecord]) -> None:
    if files.csv is not None:
        files.csv.write_text(records_csv(records))
    if files.plot is not None:
        write_picture(files.plot, partial(draw, records=records), inches=inches(records))
    files.write(to_json(job, records), partial(table, records))
