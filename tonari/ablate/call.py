"""What one call of `tonari ablate` does with the cells that it means."""

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tonari.ablate.cells import (
    CELLS,
    is_wanted,
    missing_cells,
    read_cells,
    read_failure,
    train_missing,
    write_failure,
)
from tonari.ablate.jobs import physical_cores, serve, train_in_processes, visible_gpus
from tonari.ablate.progress import Durations, Event, Progress
from tonari.ablate.report import report_words, write_report
from tonari.ablate.slurm import Array, dry_run, submit
from tonari.ablate.status import cell_states, status_document, status_text
from tonari.ablate.study import Cell, Study
from tonari.ablate.training import Stopped
from tonari.errors import CommandError
from tonari.terminal import show, wrote

INTERRUPTED, TERMINATED = 130, 143


@dataclass(frozen=True)
class Call:
    """What was asked for: arguments, and the study and cells that they mean."""

    given: argparse.Namespace
    study: Study
    cells: Sequence[Cell]
    command: str

    def run(self) -> int:
        """Do it; returns the exit status."""
        given = self.given
        if given.worker:
            return self._work()
        if given.status:
            self._show_status()
        elif given.report_only:
            self._report()
        elif given.slurm:
            if not self._submit():
                self._report()
        else:
            return self._train_or_stop()
        return 0

    def _train_or_stop(self) -> int:
        try:
            with _sigterm_raises():
                return self._train()
        except KeyboardInterrupt as stop:
            there = len(self.cells) - len(missing_cells(self.cells, self.given.out))
            print(
                f"tonari ablate: stopped with {there} of {len(self.cells)} cells there; the same "
                "command goes on with the others",
                file=sys.stderr,
            )
            is_asked = isinstance(stop, Stopped) and stop.args != ("SIGINT",)
            return TERMINATED if is_asked else INTERRUPTED

    def _train(self) -> int:
        given, out = self.given, self.given.out
        # Now, not after hours: a file that cannot be read ends the command
        durations = Durations(read_cells(self.study, out))
        missing = missing_cells(self.cells, out)
        jobs, gpus = self._places()
        jobs = max(1, min(jobs, len(missing)))
        # Tasks of an array know nothing of one another: as if there were one for each cell
        at_once = jobs if given.task is None else len(missing)
        progress = Progress(missing, durations, jobs=at_once)
        # What a task failed at, no other task of its array tries again
        job = os.environ.get("SLURM_ARRAY_JOB_ID") if given.task is not None else None
        call = f"array job {job}" if job else os.urandom(8).hex()
        if jobs > 1 or gpus:
            self._train_apart(jobs, gpus, progress.notify, call)
        else:
            train_missing(
                self.study, _rotated(self.cells, given.task, given.cells_per_task), out,
                command=self.command, call=call, notify=progress.notify,
                max_cells=None if given.task is None else given.cells_per_task,
            )  # fmt: skip
        if given.task is None:
            self._report()
        return self._show_failures(call)

    @property
    def _on_gpus(self) -> bool:
        """Whether cells train on GPUs of this machine."""
        on_cpu = all(arm.settings.get("run.device") == "cpu" for arm in self.study.arms)
        return not (on_cpu or self.study.study.launch) and bool(visible_gpus())

    def _places(self) -> tuple[int, list[str]]:
        """How many processes train, and on which GPUs; in this process where it is one and none."""
        if self.given.task is not None:
            return 1, []
        gpus = visible_gpus() if self._on_gpus else []
        if self.given.jobs == "auto":
            return len(gpus) or physical_cores(), gpus
        return self.given.jobs or 1, gpus

    def _train_apart(
        self, jobs: int, gpus: Sequence[str], notify: Callable[[Event], None], call: str
    ) -> None:
        out, cells = self.given.out, {cell.file_name: cell for cell in self.cells}

        def lost(name: str, error: str) -> None:
            if is_wanted(cells[name], out, call=call):
                write_failure(out, cells[name], call=call, error=error)

        begin = [sys.executable, "-m", "tonari", "ablate", str(self.given.study), *self._args()]
        command = [*begin, "--command", self.command, "--worker", call]
        train_in_processes(command, jobs=jobs, gpus=gpus, notify=notify, lost=lost)

    def _work(self) -> int:
        """Be one of the processes that `_train_apart` starts."""

        def train(notify: Callable[[Event], None]) -> None:
            given = self.given
            try:
                train_missing(
                    self.study, self.cells, given.out,
                    command=self.command, call=given.worker, notify=notify,
                )  # fmt: skip
            except OSError as error:
                raise unwritable(given.out, error) from error

        return serve(train, ends_on_failure=self._on_gpus)

    def _show_failures(self, call: str) -> int:
        """Say what did not come about; returns the exit status."""
        missing = missing_cells(self.cells, self.given.out)
        failures = [(cell, read_failure(self.given.out, cell)) for cell in missing]
        failed = [(cell, why["error"]) for cell, why in failures if why and why["call"] == call]
        if len(missing) > len(failed) and self.given.task is None:
            print(
                f"{len(missing) - len(failed)} of {len(self.cells)} cells are left to processes "
                "that train them now; --report-only reports again when they have ended",
                file=sys.stderr,
            )
        if not failed:
            return 0
        by_error: dict[str, list[str]] = {}
        for cell, error in failed:
            by_error.setdefault(error, []).append(f"{cell.arm.name!r} seed {cell.seed}")
        reasons = "; ".join(f"{', '.join(who)}: {error}" for error, who in by_error.items())
        print(
            f"tonari ablate: {len(failed)} of {len(self.cells)} cells failed: {reasons}. "
            f"Their traces are in {self.given.out / CELLS}/*.error; the same command tries them "
            "again",
            file=sys.stderr,
        )
        return 1

    def _report(self) -> None:
        report = self.given.out / "report"
        found = read_cells(self.study, self.given.out)
        document = write_report(report, self.study, found, self.command)
        if self.given.json:
            print(json.dumps(document))
        else:
            words = report_words(self.study, found, document)
            show([*words, *wrote(report / "report.html", report / "table.md")])

    def _show_status(self) -> None:
        states = cell_states(self.cells, self.given.out)
        found = read_cells(self.study, self.given.out)
        document = status_document(states, found, jobs=self._places()[0])
        print(json.dumps(document) if self.given.json else status_text(states, document))

    def _submit(self) -> bool:
        """Submit the missing cells, or show how; False if there are none."""
        given = self.given
        read_cells(self.study, given.out)  # now: a file that cannot be read would stop the report
        missing = missing_cells(self.cells, given.out)
        if not missing:
            return False
        array = Array(
            out=given.out.absolute(),
            study=given.study,
            config=Path(self.study.study.config) if self.study.study.config else None,
            begin=tuple([*self._args(), "--command", self.command,
                         "--cells-per-task", str(given.cells_per_task)]),
            num_tasks=-(-len(missing) // given.cells_per_task),
            at_once=None if given.jobs == "auto" else given.jobs,
            sbatch_args=tuple(shlex.split(given.slurm_args)),
        )  # fmt: skip
        print(dry_run(array) if given.dry_run else submit(array))
        return True

    def _args(self) -> list[str]:
        """What another process needs to mean the same cells, after the study file."""
        given = self.given
        return [
            *given.overrides,
            "--out", str(given.out.absolute()),
            *[part for name in given.only for part in ("--only", name)],
            *(["--seeds", str(given.seeds)] if given.seeds else []),
            *(["--full"] if given.full else []),
        ]  # fmt: skip


def unwritable(out: Path, error: OSError) -> CommandError:
    """Make the error of a directory that cannot be written."""
    return CommandError(
        f"--out {out}: {error}; the cells that are there are whole: free some space or "
        "name a directory that can be written, and the same command goes on"
    )


def _rotated(cells: Sequence[Cell], task: int | None, cells_per_task: int) -> list[Cell]:
    """Let every task of an array begin elsewhere, so that few ask for the same cell."""
    begin = (task or 0) * cells_per_task % max(1, len(cells))
    return [*cells[begin:], *cells[:begin]]


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    def stop(number: int, frame: object) -> NoReturn:
        raise Stopped("SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
