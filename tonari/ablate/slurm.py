"""Train a study as a Slurm array job: scripts, sbatch lines, and their submission.

Every task trains cells that are missing when it looks, so a task that is killed or requeued, or
two arrays at once, repeat nothing. The study file is copied: what was submitted is what is trained.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dataio.base.location import shown
from tonari.errors import CommandError

LOGS = "slurm"


@dataclass(frozen=True)
class Submission:
    """A script, and the sbatch line that submits it."""

    path: Path
    script: str
    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"# {self.path}\n{self.script}\n{shlex.join(self.command)}\n"


@dataclass(frozen=True)
class Array:
    """An array job over the cells of a study that are missing.

    Attributes:
        out: Directory of the study.
        study: Its file.
        config: The file that it changes; None: it says all itself.
        begin: Arguments that follow the study file, for every task.
        num_tasks: One for each group of missing cells.
        at_once: Tasks that may run at the same time; None: as Slurm sees fit.
        sbatch_args: Handed on to sbatch.
    """

    out: Path
    study: Path
    config: Path | None
    begin: tuple[str, ...]
    num_tasks: int
    at_once: int | None
    sbatch_args: tuple[str, ...]

    def tasks(self, copy: Path) -> Submission:
        """The array itself."""
        limit = f"%{self.at_once}" if self.at_once else ""
        script = _script(copy, [*self._begin(copy), "--task"], after=' "$SLURM_ARRAY_TASK_ID"')
        array = f"--array=0-{self.num_tasks - 1}{limit}"
        return self._submission(copy, "cells", script, "%A_%a", ["--requeue"], [array])

    def report(self, copy: Path, job: str) -> Submission:
        """The job that writes the report when all tasks have ended, however they did."""
        script = _script(copy, [*self._begin(copy), "--report-only"])
        after = f"--dependency=afterany:{job}"
        return self._submission(copy, "report", script, "%j", [], [after])

    def copies(self, copy: Path) -> dict[Path, Path]:
        """List what is copied, so that what was submitted is what is trained: file -> copy."""
        return {self.study: copy} | ({self.config: _config_of(copy)} if self.config else {})

    def _begin(self, copy: Path) -> list[str]:
        """Let the tasks read the copy of the file that the study changes."""
        return [*self.begin, *([f"study.config={_config_of(copy)}"] if self.config else [])]

    def _submission(
        self, copy: Path, what: str, script: str, log: str, given: list[str], forced: list[str]
    ) -> Submission:
        path = copy.with_suffix(f".{what}.sh")
        name = f"--job-name={self.study.stem}-{what}"
        # To sbatch a lone % of a path begins a pattern of its own
        plain = str(copy.with_suffix("")).replace("%", "%%")
        output = f"--output={plain}.{what}-{log}.log"
        # The last of two is what sbatch takes: the user's above ours, except what must be
        line = ["sbatch", "--parsable", name, output, *given, *self.sbatch_args, *forced, str(path)]
        return Submission(path, script, tuple(line))


def _config_of(copy: Path) -> Path:
    return copy.with_suffix(".config.toml")


def _script(copy: Path, args: Sequence[str], *, after: str = "") -> str:
    command = [sys.executable, "-m", "tonari", "ablate", str(copy), *args]
    # exec: a signal from Slurm reaches the process that can answer it
    return (
        "#!/bin/bash\n"
        f"cd {shlex.quote(str(Path.cwd()))} || exit 1\n"
        f"exec {shlex.join(command)}{after}\n"
    )


def copy_path(out: Path) -> Path:
    """Name a copy of the study file, and so what belongs to one submission."""
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    return out.absolute() / LOGS / f"{stamp}.toml"


def submit(array: Array) -> str:
    """Write the scripts and submit them.

    Returns:
        What to show the user.

    Raises:
        CommandError: If there is no sbatch here, or it refuses.
    """
    if shutil.which("sbatch") is None:
        raise CommandError(
            "--slurm: found no `sbatch` in PATH, expected Slurm's; call this on a login node, "
            "leave out --slurm to train here, or add --dry-run to see the script"
        )
    copy = copy_path(array.out)
    copy.parent.mkdir(parents=True, exist_ok=True)
    for file, its_copy in array.copies(copy).items():
        its_copy.write_text(_without_secrets(file.read_text(), f"{file}"))
    job = _sbatch(array.tasks(copy))
    try:
        report = _sbatch(array.report(copy, job))
    except CommandError as error:
        raise CommandError(
            f"job {job} is submitted and will train the cells, but not the job that writes the "
            f"report: {error}; give --report-only when it has ended"
        ) from error
    tasks = "one task" if array.num_tasks == 1 else f"{array.num_tasks} tasks"
    return (
        f"submitted job {job} ({tasks}) and job {report}, which writes the report when it has "
        f"ended; --status says how far it is, logs are in {copy.parent}"
    )


def dry_run(array: Array) -> str:
    """Show what `submit` would write and run."""
    copy = copy_path(array.out)
    return f"{array.tasks(copy)}\n{array.report(copy, '$JOB')}"


def _without_secrets(text: str, where: str) -> str:
    """Refuse what would keep a secret beside the results.

    Raises:
        CommandError: If a URL in it holds one.
    """
    if shown(text) != text:
        raise CommandError(
            f"--slurm: {where} has a URL with a secret, which scripts and copies in {LOGS} would "
            "keep; give credentials by variables of the environment, which sbatch hands on"
        )
    return text


def _sbatch(submission: Submission) -> str:
    """Submit; returns the job's number."""
    submission.path.write_text(_without_secrets(submission.script, "an argument"))
    ended = subprocess.run(submission.command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise CommandError(
            f"`{shlex.join(submission.command)}` ended with status {ended.returncode}, expected 0: "
            f"{ended.stderr.strip()}; correct --slurm-args, or give --cells-per-task for fewer "
            "tasks"
        )
    # JOB or JOB;CLUSTER
    return ended.stdout.strip().partition(";")[0]
