"""What do fresh samples cost: by exchange, by one get a sample, by reading a shared file again?

One job of MPI ranks for each set and number of ranks, each rank its own node. All ways run in it,
an epoch each, one after the other, so that what else the machine does slows all of them alike.
Ratios are to the local shuffle, within a repeat.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from tonari.bench.errors import BenchError
from tonari.bench.exchange.task import Epoch, ExchangeSettings, ExchangeTask
from tonari.bench.loader.launch import LAUNCHER_PREFIXES, ROOT, end, last_words
from tonari.bench.notify import Notify
from tonari.mpi import mpiexec_command

BANDWIDTH = f"{__package__}.bandwidth"
BANDWIDTH_TIMEOUT_S = 900.0

Launch = Callable[[int], Sequence[str]]
"""Ranks -> the command line that starts so many of the program behind it."""


@dataclass(frozen=True, kw_only=True)
class ExchangeSet:
    """Samples that a rank trains in an epoch.

    Attributes:
        name: Its name on the command line.
        rows_per_rank: Samples of each rank, a multiple of the batch size.
        row_bytes: Size of a sample.
        batch_size: Rows a step.
    """

    name: str
    rows_per_rank: int
    row_bytes: int
    batch_size: int = 32

    @property
    def num_steps(self) -> int:
        return self.rows_per_rank // self.batch_size

    def scaled(self, scale: float) -> "ExchangeSet":
        """Take a part of the steps, one at least."""
        steps = max(round(self.num_steps * scale), 1)
        return replace(self, rows_per_rank=steps * self.batch_size)


SETS = {
    spec.name: spec
    for spec in (
        ExchangeSet(name="100k", rows_per_rank=3200, row_bytes=100 << 10),
        ExchangeSet(name="100k-20", rows_per_rank=640, row_bytes=100 << 10),
        ExchangeSet(name="3k", rows_per_rank=3200, row_bytes=3 << 10),
    )
}


@dataclass(frozen=True, kw_only=True)
class ExchangeJobs:
    """What is measured, and where.

    Attributes:
        settings: Of each set.
        sets: The sets, scaled.
        ranks: Numbers of ranks, measured one after the other.
        directory: Where caches are made, on each node.
        shared: A directory that all ranks see.
        launch: Makes the command that starts ranks.
    """

    settings: ExchangeSettings
    sets: Sequence[ExchangeSet]
    ranks: Sequence[int]
    directory: Path
    shared: Path
    launch: Launch = mpiexec_command


@dataclass
class MeasuredExchange:
    """What was measured of one set on some ranks; complete when its job has ended."""

    spec: ExchangeSet
    ranks: int
    step: Mapping[str, object] = field(default_factory=dict)
    epochs: list[Epoch] = field(default_factory=list)


def measure_exchange(jobs: ExchangeJobs, notify: Notify) -> Iterator[MeasuredExchange]:
    """Measure one case after the other. Each is yielded before its first epoch, and filled then.

    Raises:
        BenchError: If MPI is missing, or a job fails.
    """
    for spec in jobs.sets:
        for ranks in jobs.ranks:
            case = MeasuredExchange(spec, ranks)
            yield case
            _run(case, jobs, notify)


def _run(case: MeasuredExchange, jobs: ExchangeJobs, notify: Notify) -> None:
    spec, settings = case.spec, jobs.settings
    name = f"{spec.name}-{case.ranks}"
    shared = jobs.shared / name
    shared.mkdir(parents=True, exist_ok=True)
    task = ExchangeTask(
        settings=settings, rows_per_rank=spec.rows_per_rank, row_bytes=spec.row_bytes,
        batch_size=spec.batch_size, cache=str(jobs.directory / name), shared=str(shared),
    )  # fmt: skip
    path = shared / "task.json"
    path.write_bytes(msgspec.json.encode(task))
    command = [*jobs.launch(case.ranks), sys.executable, "-m", f"{__package__}.job"]
    begin = f"{spec.name}, {case.ranks} ranks"
    for message in lines([*command, str(path)], shared / "job.log", settings.timeout_s):
        if "epoch" in message:
            epoch = Epoch(**message["epoch"])  # type: ignore[arg-type]
            case.epochs.append(epoch)
            ratio = f"Q={epoch.fraction:g}" if epoch.fraction else ""
            of = f"repeat {epoch.repeat + 1} of {settings.repeats}"
            notify(f"{begin}: {of}: {epoch.way} {ratio} {epoch.step} step: {epoch.epoch_s:.3f} s")
        elif "begun" in message:
            case.step = dict(message["begun"])  # type: ignore[call-overload]
        else:
            notify(f"{begin}: {message.get('progress')}")


def lines(command: Sequence[str], log: Path, timeout_s: float) -> Iterator[Mapping[str, object]]:
    """Run a job and yield the JSON lines that it writes on stdout. Blocks; ends with the job.

    Args:
        command: What to run.
        log: Gets the job's stderr.
        timeout_s: The job is ended when it writes nothing for so long.

    Raises:
        BenchError: If the job fails, or writes nothing for too long.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TONARI_RANKS_PER_NODE": "1"}
    silent = threading.Event()
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True, cwd=ROOT,
        )  # fmt: skip
    assert process.stdout is not None

    def give_up() -> None:
        silent.set()
        end(process, wait_s=0)

    watch = threading.Timer(timeout_s, give_up)
    watch.start()
    try:
        for line in process.stdout:
            watch.cancel()
            if line.startswith(b"{"):
                yield dict(json.loads(line))
            watch = threading.Timer(timeout_s, give_up)
            watch.start()
        status = process.wait()
    finally:
        watch.cancel()
        end(process, wait_s=0)
        process.stdout.close()
    if silent.is_set() or status != 0:
        found = f"wrote nothing for {timeout_s:g} s" if silent.is_set() else f"ended with {status}"
        raise BenchError(
            f"{' '.join(command[-3:])}: {found}; its last errors: {last_words(log, 3)}; try a "
            "small part alone with --scale 0.1 --exchanges 0.1 --get 0 --shared-rate 0"
        )


def measure_bandwidth(jobs: ExchangeJobs, notify: Notify) -> list[Mapping[str, object]]:
    """Measure rows to rows against a bare ring on two ranks."""
    notify("bandwidth, rows to rows")
    jobs.directory.mkdir(parents=True, exist_ok=True)
    command = [*jobs.launch(2), sys.executable, "-m", BANDWIDTH, "--json"]
    command += ["--directory", str(jobs.directory)]
    return list(lines(command, jobs.shared / "bandwidth.log", BANDWIDTH_TIMEOUT_S))
