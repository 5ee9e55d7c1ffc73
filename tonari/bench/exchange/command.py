"""`tonari bench exchange`: what fresh samples cost, beside epochs on a node's own."""

import shutil
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
    ExchangeSettings,
    MeasuredExchange,
    measure_bandwidth,
    measure_exchange,
)
from tonari.bench.exchange.report import draw, epochs_csv, inches, rows, table, to_json
from tonari.bench.exchange.task import Step
from tonari.bench.notify import notify_on_stderr
from tonari.bench.outputs import ResultOutputs
from tonari.mpi import mpiexec_command
from tonari.report.pictures import write_picture


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Measure epochs while rows travel between nodes, against epochs in which none does.

    Ranks under MPI stand for nodes. Each trains on generated samples, 32 a step; a step is a sleep,
    which leaves the processor to the exchange as an accelerator does, and then matrix products of
    the same length, which do not. All ways take turns, an epoch each: local, the exchange at every
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
    exchanges: tuple[float, ...] = (0.0, 0.05, 0.1, 0.3, 0.5, 1.0)
    """Fractions Q of a rank's rows that are exchanged each epoch."""
    get: float = 0.1
    """Fraction fetched by one message a sample; 0: leave that way out."""
    shared_rate: float = 200.0
    """MB/s of the shared directory, all ranks together; 0: leave that way out."""
    steps: tuple[Step, ...] = ("sleep", "product")
    """How a step is emulated."""
    step: float = 0.02
    """Seconds that a step lasts."""
    repeats: int = 5
    """Epochs measured of each, beside a first."""
    timeout: float = 300.0
    """Seconds without a sign of life after which a job is ended."""
    directory: Path | None = None
    """For caches and the shared file, on a local disk; they are removed. Left out: the temporary
    directory."""
    bandwidth: bool = True
    """Measure bytes from rows to rows too, against a bare ring of messages."""
    outputs: tyro.conf.OmitArgPrefixes[ResultOutputs] = field(default_factory=ResultOutputs)

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise ValueError(f"--scale is {self.scale}, must be in (0, 1]")
        if min(self.ranks, default=0) < 2:
            raise ValueError("--ranks must be numbers >= 2: one rank has nobody to exchange with")
        if not all(0 <= fraction <= 1 for fraction in (*self.exchanges, self.get)):
            raise ValueError("--exchanges and --get must be fractions in [0, 1]")
        if self.repeats < 1 or not self.step > 0 or not self.shared_rate >= 0:
            raise ValueError("--repeats must be >= 1, --step > 0 and --shared-rate >= 0")


def bench_exchange(options: Exchange) -> int:
    """Run the command."""
    mpiexec_command(2)  # fails now, with the cure, and not after a directory was filled
    options.outputs.check()
    parent = options.directory or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="tonari-exchange-", dir=parent.absolute()))
    try:
        return run(options, settings_of(options, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def settings_of(options: Exchange, directory: Path) -> ExchangeSettings:
    """Turn flags into settings; all files go below a directory."""
    return ExchangeSettings(
        sets=[SETS[name].scaled(options.scale) for name in options.sets],
        ranks=options.ranks,
        exchanges=options.exchanges,
        get=options.get,
        shared_bytes_per_s=options.shared_rate * 1e6,
        steps=options.steps,
        step_s=options.step,
        repeats=options.repeats,
        timeout_s=options.timeout,
        directory=directory / "node",
        shared=directory / "shared",
    )


def run(options: Exchange, settings: ExchangeSettings) -> int:
    """Measure, and write what was asked for."""
    cases: list[MeasuredExchange] = []
    bandwidth: Sequence[Mapping[str, object]] = []
    try:
        for case in measure_exchange(settings, notify_on_stderr):
            cases.append(case)
        if options.bandwidth:
            bandwidth = measure_bandwidth(settings, notify_on_stderr)
    finally:
        # An interrupted run keeps what it finished.
        _write(options, settings, [case for case in cases if case.epochs], bandwidth)
    wrong = [row for case in cases for row in rows(case) if not row["exact"]]
    for row in wrong:
        sys.stderr.write(
            f"tonari bench: {row['set']}, {row['way']} {row['fraction']}: samples were lost or "
            "repeated; see the table\n"
        )
    return 1 if wrong else 0


def _write(
    options: Exchange, settings: ExchangeSettings, cases: Sequence[MeasuredExchange],
    bandwidth: Sequence[Mapping[str, object]],
) -> None:  # fmt: skip
    files = options.outputs
    if files.csv is not None:
        files.csv.write_text(epochs_csv(cases))
    if files.plot is not None:
        write_picture(files.plot, partial(draw, cases=cases), inches=inches(cases))
    files.write(to_json(settings, cases, bandwidth), partial(table, cases, bandwidth))
