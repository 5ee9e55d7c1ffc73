"""Runs jobs of several ranks that end in the middle, starts them again, and compares."""

import contextlib
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import Self

from tests.faults.kill import compare
from tests.faults.kill.compare import Start, read_log
from tests.faults.kill.job import Options, write_shards
from tests.faults.kill.schedule import (
    Configuration,
    Interruption,
    Launcher,
    Trace,
    What,
    configuration,
    draw,
)
from tests.faults.kill.train_job import TrainOptions, write_data
from tests.forked.python import ForkedPython, wait_together
from tests.multirank import ROOT, run_job
from tonari.mpi import mpiexec_command

SCRIPT = ROOT / "tests/ranks/kill_job.py"
MODULES = {"loader": "tests.faults.kill.job", "train": "tests.faults.kill.train_job"}
LIMIT_S = 180.0
GONE_S = 30.0
"""How long a process of a killed job may take to notice."""
REDRAWS = 4
TAG = "TONARI_KILL_HARNESS"
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Whole:
    """A configuration's undisturbed run.

    Attributes:
        place: Its cache and saves.
        start: The run.
        coda: A second start, of one epoch more.
        first, later: The moments of each rank, of the run and of the second start.
        faults: What was wrong already.
    """

    place: Path
    start: Start
    coda: Start
    first: Sequence[Trace]
    later: Sequence[Trace]
    faults: Sequence[str]


@dataclass
class Result:
    """What came of a seed.

    Attributes:
        configuration: The job.
        launcher: What started it.
        done: The interruptions that took place.
        faults: What was wrong; empty: nothing.
        duration_s: Of it all.
    """

    configuration: Configuration
    launcher: Launcher
    done: list[Interruption] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    duration_s: float = 0.0


def quick_directory() -> str | None:
    """Find where flushing takes no time; None: only the usual place has room."""
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_BYTES
    return str(MEMORY) if has_room else None


class Harness:
    """Starts jobs, and remembers the undisturbed ones.

    Args:
        directory: For everything.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tag = f"{os.getpid()}-{time.monotonic_ns()}"
        self._wholes: dict[Configuration, Whole] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of all that it starts; one of them marks it."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, TAG: self._tag}

    @cached_property
    def _python(self) -> ForkedPython:
        # Not the one of other tests: all that this one forks has its mark.
        modules = ("numpy", "torch", "tests.faults.kill.harness", *MODULES.values())
        return self._stack.enter_context(ForkedPython(self.environment, modules=modules, zygotes=1))

    @cached_property
    def _data(self) -> Path:
        data = self._directory / "data"
        data.mkdir()
        write_shards(data)
        write_data(data)
        return data

    def run(self, seed: int, *, what: What = "loader") -> Result:
        """Run a seed's schedule; one of which nothing took place is drawn anew."""
        chosen, launcher = configuration(seed, what=what)
        whole = self.whole(chosen)
        if whole.faults:
            return Result(chosen, launcher, faults=list(whole.faults))
        count = len(compare.batches(whole.start.logs[0]))
        for attempt in range(REDRAWS):
            drawn = draw(
                seed, attempt, first=whole.first, later=whole.later, batches=count, what=what
            )
            result = self.follow(chosen, drawn, launcher=launcher)
            if result.done or result.faults:
                return result
        result.faults.append(f"no interruption took place in {REDRAWS} draws: nothing was tested")
        return result

    def follow(
        self, chosen: Configuration, drawn: Sequence[Interruption], *, launcher: Launcher = "fork"
    ) -> Result:
        """Interrupt a job as told, let it come to its end, and compare."""
        began = time.monotonic()
        whole = self.whole(chosen)
        result = Result(chosen, launcher, faults=list(whole.faults))
        if not result.faults:
            with tempfile.TemporaryDirectory(dir=self._directory, prefix="job-") as place:
                result.faults += self._follow(result, drawn, whole, Path(place))
        result.duration_s = time.monotonic() - began
        return result

    def _follow(
        self, result: Result, drawn: Sequence[Interruption], whole: Whole, place: Path
    ) -> list[str]:
        chosen, launcher, starts = result.configuration, result.launcher, []
        for interruption in [*drawn, Interruption()]:
            start = self.start(chosen, place, interruption, launcher=launcher)
            faults = self._faults_of_start(start, place)
            if faults:
                return faults
            starts.append(start)
            if start.interrupted:
                result.done.append(interruption)
            if start.ended:
                break
        if not result.done:
            return []
        faults = [
            *compare.faults_of_batches(whole.start, starts),
            *compare.faults_of_end(whole.start, starts[-1]),
        ]
        if isinstance(chosen.options, TrainOptions):
            faults += compare.faults_of_training(whole.place, place)
        else:
            faults += compare.faults_of_scores(chosen.options, whole.place, place)
        # What a cache says wrongly of itself shows when it is opened again.
        longer = _longer(chosen)
        coda = self.start(longer, place, Interruption(), launcher=launcher)
        broken = self._faults_of_start(coda, place)
        faults += broken or [
            *compare.faults_of_batches(whole.coda, [coda]),
            *compare.faults_of_source(longer.options, whole.coda, [*starts, coda]),
            *compare.litter(longer.options, place, [*starts, coda]),
        ]
        return faults

    def whole(self, chosen: Configuration) -> Whole:
        """Run a configuration undisturbed, the first time that it is asked for."""
        if chosen not in self._wholes:
            self._wholes[chosen] = self._whole(chosen)
        return self._wholes[chosen]

    def _whole(self, chosen: Configuration) -> Whole:
        place = Path(tempfile.mkdtemp(dir=self._directory, prefix="whole-"))
        start = self.start(chosen, place, Interruption(), traced=True)
        faults = self._faults_of_start(start, place)
        # As it is before the second start adds to it.
        saved = place.with_name(f"{place.name}-saved")
        if faults:
            return Whole(saved, start, start, (), (), faults)
        shutil.copytree(place, saved, ignore=shutil.ignore_patterns("cache", "start-*"))
        coda = self.start(_longer(chosen), place, Interruption(), traced=True)
        faults += self._faults_of_start(coda, place)
        if faults:
            return Whole(saved, start, coda, (), (), [f"undisturbed: {fault}" for fault in faults])
        faults += compare.faults_of_whole(
            start, shows_all=_shows_all(chosen.options), repeats=_repeats(chosen.options)
        )
        faults += compare.litter(chosen.options, place, [start, coda])
        first, later = (
            [json.loads((directory / f"{rank}.trace").read_text()) for rank in range(chosen.ranks)]
            for directory in (place / "start-1", place / "start-2")
        )
        told = [f"undisturbed: {fault}" for fault in faults]
        return Whole(saved, start, coda, first, later, told)

    def start(
        self, chosen: Configuration, place: Path, interruption: Interruption, *,
        launcher: Launcher = "fork", traced: bool = False,
    ) -> Start:  # fmt: skip
        """Start the job once, and wait until all its ranks are gone."""
        attempt = place / f"start-{self._count(place) + 1}"
        attempt.mkdir()
        (place / "saves").mkdir(exist_ok=True)
        request = {
            "what": "train" if isinstance(chosen.options, TrainOptions) else "loader",
            "ranks": chosen.ranks,
            "attempt": str(attempt),
            "limit_s": LIMIT_S,
            "environment": {"TONARI_RANKS_PER_NODE": str(chosen.per_node)},
            "argument": {
                "options": asdict(chosen.options),
                "data": str(self._data),
                "place": str(place),
                "attempt": str(attempt),
                "kill": asdict(interruption.kill) if interruption.kill else None,
                "slow": asdict(interruption.slow) if interruption.slow else None,
                "stop": interruption.stop,
                "saves_at_stop": interruption.saves,
                "traced": traced,
            },
        }
        statuses = self._mpiexec(request) if launcher == "mpiexec" else self._fork(request)
        logs = [read_log(attempt / f"{rank}.log") for rank in range(chosen.ranks)]
        return Start(logs, statuses)

    def _count(self, place: Path) -> int:
        return len(list(place.glob("start-*")))

    def _fork(self, request: dict[str, Any]) -> list[int]:
        attempt, environ = Path(request["attempt"]), self.environment | request["environment"]
        arguments = [str(SCRIPT), json.dumps(request)]
        with contextlib.ExitStack() as stack:
            nothing = stack.enter_context(open(os.devnull))
            ranks = []
            for rank in range(request["ranks"]):
                output = stack.enter_context(open(attempt / f"{rank}.out", "a"))
                files = {0: nothing.fileno(), 1: output.fileno(), 2: output.fileno()}
                forked = self._python.fork([*arguments, str(rank)], environ=environ, files=files)
                ranks.append(stack.enter_context(contextlib.closing(forked)))
            statuses, timed_out = wait_together(ranks, limit_s=request["limit_s"])
        if timed_out:
            (attempt / "timed-out").touch()
        return statuses

    def _mpiexec(self, request: dict[str, Any]) -> list[int]:
        attempt = Path(request["attempt"])
        begin = [*mpiexec_command(request["ranks"]), *self._python.command]
        command = [*begin, str(SCRIPT), json.dumps(request)]
        environment = {**self.environment, **request["environment"]}
        status, output = run_job(command, env=environment, timeout_s=LIMIT_S)
        (attempt / "0.out").write_text(output)
        return [status] * request["ranks"]

    def _faults_of_start(self, start: Start, place: Path) -> list[str]:
        """Check how the newest start ended."""
        attempt, faults = place / f"start-{self._count(place)}", []
        killed = any(record["kind"] == "kill" for log in start.logs for record in log)
        if (attempt / "timed-out").exists():
            faults.append(f"{attempt.name}: hung{_tail(attempt)}")
        elif any(start.statuses) and not killed:
            faults.append(f"{attempt.name}: ended unasked with {start.statuses}{_tail(attempt)}")
        elif not any(start.statuses) and not (start.ended or start.interrupted):
            faults.append(f"{attempt.name}: left before its end{_tail(attempt)}")
        left = self.left_over()
        return [*faults, f"{attempt.name}: left processes behind: {left}"] if left else faults

    def left_over(self) -> list[str]:
        """Wait for what a job left to end; end it, and name it, if it does not."""
        found = []
        deadline = time.monotonic() + GONE_S
        for pid in self._tagged():
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                gone = poll.poll(1000 * max(deadline - time.monotonic(), 0))
                os.close(descriptor)
                if not gone:
                    found.append(f"{pid} {_command(pid)}")
                    os.kill(pid, signal.SIGKILL)
        return found

    def _tagged(self) -> list[int]:
        """Find all processes that this harness's jobs started, by the variable they inherited."""
        own = {*self._python.pids, os.getpid()}
        mark, found = f"{TAG}={self._tag}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            pid = int(path.parent.name)
            with contextlib.suppress(OSError):
                if pid not in own and mark in path.read_bytes():
                    found.append(pid)
        return found


def _shows_all(options: Options | TrainOptions) -> bool:
    if isinstance(options, TrainOptions):
        return not any("importance" in override for override in options.overrides)
    return options.importance in ("none", "full", "weighted") and not options.mixed


def _repeats(options: Options | TrainOptions) -> bool:
    return isinstance(options, Options) and options.importance in ("weighted", "pooled")


def _longer(chosen: Configuration) -> Configuration:
    options = replace(chosen.options, epochs=chosen.options.epochs + 1)
    return replace(chosen, options=options)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
    return "gone since"


def _tail(attempt: Path) -> str:
    lines = [
        f"{path.stem}| {line}"
        for path in sorted(attempt.glob("*.out"))
        for line in path.read_text().splitlines()[-9:]
    ]
    return "".join(f"\n    {line}" for line in lines)
