"""`tonari bench exchange`: what fresh samples cost, beside epochs on a node's own."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from tonari.bench.exchange.exchange import (
    SETS,
    ExchangeJobs,
    MeasuredExchange,
    measure_bandwidth,
    measure_exchange,
)
from tonari.bench.exchange.report import draw, epochs_csv, inches, rows, table, to_json
from tonari.bench.exchange.task import ExchangeSettings
from tonari.bench.notify import notify_on_stderr
from tonari.bench.outputs import ResultOutputs
from tonari.mpi import mpiexec_command
from tonari.report.pictures import write_picture


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Measure epochs while rows travel between nodes, against epochs in which none does.

    Ranks under MPI stand for nodes. Each trains on generated samples, 32 a step; a step is a sleep,
    which leaves the processor to the exchange as an accelerator does, and then matrix products of
    the same length, which do not. All ways alternate, an epoch each: local, the exchange at every
    Q, the same rows by one message a sample (get), and other samples each epoch from a shared file
    of a given bandwidth (reread). Each epoch counts with its end, that is until its arrivals are
    durable and the next can begin.

    "x local" is the median over repeats of the epoch's time over that of the local epoch beside it;
    Q=0 shows how far noise alone takes it. "MB/s" is what Q means: bytes that a rank sends, over
    the time of a local epoch. "overlap" is the part of the arrivals that came before the epoch's
    end; "CPU s/GB" the processor time beyond a local epoch's, of all ranks. The set 100k-20 has 20
    steps an epoch, where an exchange is hardest to hide.

    First `tonari bench exchange --sets 100k-20 --steps sleep` for an impression in a minute. All of
    it takes about 10 GB of disk in --directory and some ten minutes.

    Exit status: 0; 1 if a job failed, or samples were lost or repeated.
    """

    sets: tuple[Literal["100k", "100k-20", "3k"], ...] = ("100k", "100k-20")
    """Samples a rank: 3,200 x 100 KiB, 640 x 100 KiB, 3,200 x 3 KiB."""
    scale: float = 1.0
    """Part of each set's steps to take, in (0, 1]."""
    ranks: tuple[int, ...] = (2,)
    """Ranks on this machine, each a node, such as `--ranks 2 4`."""
    settings: tyro.conf.OmitArgPrefixes[ExchangeSettings] = field(default_factory=ExchangeSettings)
    directory: Path = Path(tempfile.gettempdir())
    """For caches and the shared file, on a local disk; they are removed."""
    bandwidth: bool = True
    """Measure bytes from rows to rows too, against a bare ring of messages."""
    outputs: tyro.conf.OmitArgPrefixes[ResultOutputs] = field(default_factory=ResultOutputs)

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise ValueError(f"--scale is {self.scale}, must be in (0, 1]")
        if min(self.ranks, default=0) < 2:
            raise ValueError("--ranks must be numbers >= 2: one rank has nobody to exchange with")
        of = self.settings
        if not all(0 <= fraction <= 1 for fraction in (*of.exchanges, of.get)):
            raise ValueError("--exchanges and --get must be fractions in [0, 1]")
        if of.repeats < 1 or not of.step_s > 0 or not of.shared_rate >= 0:
            raise ValueError("--repeats must be >= 1, --step > 0 and --shared-rate >= 0")


def bench_exchange(options: Exchange) -> int:
    """Run the command."""
    mpiexec_command(2)  # fails now, with the cure, and not after a directory was filled
    options.outputs.check()
    parent = options.directory.absolute()
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="tonari-exchange-", dir=parent, ignore_cleanup_errors=True
    ) as directory:
        return run(options, jobs_of(options, Path(directory)))


def jobs_of(options: Exchange, directory: Path) -> ExchangeJobs:
    """Choose what is measured; all files go below a directory."""
    return ExchangeJobs(
        settings=options.settings, ranks=options.ranks,
        sets=[SETS[name].scaled(options.scale) for name in options.sets],
        directory=directory / "node", shared=directory / "shared",
    )  # fmt: skip


def run(options: Exchange, jobs: ExchangeJobs) -> int:
    """Measure, and write what was asked for."""
    cases: list[MeasuredExchange] = []
    bandwidth: Sequence[Mapping[str, object]] = []
    try:
        for case in measure_exchange(jobs, notify_on_stderr):
            cases.append(case)
        if options.bandwidth:
            bandwidth = measure_bandwidth(jobs, notify_on_stderr)
    finally:
        # An interrupted run keeps what it finished.
        _write(options.outputs, jobs, [case for case in cases if case.epochs], bandwidth)
    wrong = [row for case in cases for row in rows(case) if not row["exact"]]
    for row in wrong:
        sys.stderr.write(
            f"tonari bench: {row['set']}, {row['way']} {row['fraction']}: samples were lost or "
            "repeated; see the table\n"
        )
    return 1 if wrong else 0


def _write(
    files: ResultOutputs, jobs: ExchangeJobs, cases: Sequence[MeasuredExchange],
    bandwidth: Sequence[Mapping[str, object]],
) -> None:  # fmt: skip
    if files.csv is not None:
        files.csv.write_text(epochs_csv(cases))
    if files.plot is not None:
        write_picture(files.plot, partial(draw, cases=cases), inches=inches(cases))
    files.write(to_json(jobs, cases, bandwidth), partial(table, cases, bandwidth))
