"""What commands show on a terminal of 80 columns, and what they write into a log.

Run ``python -m tests.tonari.test_screens`` to write the files anew. Each command runs in a fork of
one process that has imported all of it, on a pseudo-terminal and on a pipe. What no two runs share
is masked by kind: times, bytes, rates, losses, paths. What would take long or depends on the
machine stands in for itself below the command: a phase of bench io, a cell of ablate, the checks of
doctor, a probe.
"""

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.multirank import ROOT

GOLDEN = ROOT / "tests" / "golden" / "screens"
COLUMNS = 80
BAR = "\N{BOX DRAWINGS HEAVY HORIZONTAL}"
BROKEN = "\N{PILCROW SIGN}"
"""Stands before each further line of one that was broken at words."""

KINDS = ("terminal", "log")
PHASES = "--patterns random_record sequential_shard --threads 1 2 --size 1MiB --repeats 1"
SCREENS = {
    "train": "train run.toml run.epochs=2 run.log_steps=2 run.directory=run-{kind} "
    "data.cache.path=cache importance.kind=random importance.fraction=0.3",
    "rows": "rows run-log --step 2",
    "plan": "plan run.toml --probe probe.json --picture plan.svg",
    "rehearse": "rehearse run.toml run.epochs=90 --nodes 64 --days 30 --mtbf 2000h --epoch 6h "
    "--staging 20m --checkpoint-cost 1m --time-limit 24h --disk-full 0.01",
    "search": "search gpt.toml --cluster h100.toml --world 2",
    "ablate": "ablate study.toml --out study-{kind}",
    "bench_io": f"bench io disk --scratch node --csv io.csv {PHASES}",
    "doctor": "doctor",
    "bench_help": "bench --help",
}
MASKS: dict[str, tuple[tuple[str, str], ...]] = {
    "train": (
        (r"\d:\d\d:\d\d", "H:MM:SS"),
        (r"(?<= )\d[\d,]*\.\d s\b", "N s"),
        (r"(?<= )\d[\d,]* samples/s", "N samples/s"),
        (r"(read|about) \d[\d.]* [KM]?B\b", r"\1 N B"),
        (r"(loss|accuracy) \d\.\d{4}\b", r"\1 N"),
    ),
    "plan": ((r"(of pp:) \d[\d.]* [KM]?B\b", r"\1 N B"),),
    "ablate": ((r"about \d+ (seconds|minutes) left", r"about N \1 left"),),
    "bench_io": (
        (r"(?m)^\d\d:\d\d:\d\d \d+ of ", "HH:MM:SS N of "),
        (r"(?m)^(DIR|node): \S+, .*", r"\1: its path, filesystem and room"),
    ),
}  # fmt: skip
"""By command, what no two runs share, and the word in its place."""


def make_inputs(directory: Path) -> None:
    """Write what the commands are given."""
    import torch

    from tests.oracle.test_trace import GPT
    from tests.tonari.ablate.study import STUDY
    from tests.trainer.digits import write_config
    from tonari.oracle.probe.probe import step_settings
    from tonari.trainer.config.config import load_config

    write_config(directory)
    (directory / "disk").mkdir()
    (directory / "node").mkdir()
    (directory / "gpt.toml").write_text(GPT)
    shutil.copy(ROOT / "examples/clusters/h100.toml", directory)
    probe = json.loads((GOLDEN / "probe.json").read_text())
    settings = load_config(directory / "run.toml", probe["overrides"])
    probe |= {"settings": step_settings(settings), "torch": torch.__version__}
    (directory / "probe.json").write_text(json.dumps(probe))
    (directory / "study.toml").write_text(STUDY)


def stand_in(name: str) -> None:
    """Put what would take long, or depends on the machine, in place of itself; see above."""
    if name == "ablate":
        from tonari.ablate import cells, report
        from tonari.ablate.training import Point, Trained, run_directory
        from tonari.report import pages

        def train_cell(study: Any, cell: Any, out: Path) -> Trained:
            half = 1.0 if cell.arm.name == "plain" else 0.5
            run_directory(cell, out).mkdir(parents=True)
            accuracy = 0.9 - 0.02 * cell.seed - 0.1 * (1 - half)
            point = Point(0, 1.0, accuracy, 0.5, 40 * half, 600, 1 - half)
            return Trained((point,), accuracy, 0.5, 44 * half, 40 * half, 600, 600, 1 - half)

        vars(cells)["train_cell"] = train_cell
        for module in (report, pages):
            vars(module)["render"] = lambda draw, inches, kind: b""
    elif name == "bench_io":
        from msgspec.structs import replace

        from tests.tonari.bench.storage.fabricated import make_results
        from tonari.bench.storage.patterns import measure

        phases = make_results(noise=0, repeats=1, clients=(1,)).phases
        known = {(phase.pattern, phase.tier, phase.wanted): phase for phase in phases}

        def measure_phase(job: Any, target: Any, pattern: Any, point: Any) -> Any:
            shared = known[pattern.name, "shared", point.wanted]
            found = known.get((pattern.name, target.tier, point.wanted), shared)
            return replace(found, tier=target.tier, clients=1, threads=point.threads)

        vars(measure)["measure_phase"] = measure_phase
    elif name == "doctor":
        from tonari import doctor
        from tonari.checks import Finding

        vars(doctor)["_alone"] = lambda options: [
            Finding("python", "fine", "3.13.1"),
            Finding("cache directory", "look", "tmpfs, 40 GB free at /tmp", "it lives in memory"),
            Finding("MPI", "broken", "mpiexec of another MPI", "put that of mpi4py first in PATH"),
        ]


def show(name: str, kind: str, directory: Path) -> None:
    """Run a command in this process, which standard output and error are set up for."""
    from tonari import cli, terminal

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    fill = terminal.fill
    terminal.fill = lambda line, width: fill(line, width - 1).replace("\n", f"\n{BROKEN}")
    stand_in(name)
    os.chdir(directory)
    os.environ["TERM"] = "xterm-256color"
    status = cli.main(SCREENS[name].format(kind=kind).split())
    print(f"exit status {status}", flush=True)


def run_in_fork(name: str, kind: str, directory: Path) -> str:
    """Run a command in a fork of this process; returns all that it wrote."""
    ours, theirs = pty.openpty() if kind == "terminal" else os.pipe()
    if kind == "terminal":
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    pid = os.fork()
    if not pid:
        status = 1
        try:
            for number in (1, 2):
                os.dup2(theirs, number)
            show(name, kind, directory)
            status = 0
        finally:
            os._exit(status)
    os.close(theirs)
    wrote = bytearray()
    while part := _read(ours):
        wrote += part
    os.close(ours)
    os.waitpid(pid, 0)
    return wrote.decode().replace("\r\n", "\n")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # a terminal whose other side is gone
        return b""


def seen(wrote: str) -> str:
    """Make of what was written what is seen at the end, with the last that each bar showed."""
    lines: list[str] = []
    bar = ""
    for line in re.sub(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]", "", wrote).split("\n"):
        *over, last = re.split(r"\r?(?:\x1b\[1A)?\x1b\[2?K", line)
        bar = ([bar] + [text for text in [*over, last] if BAR in text])[-1]
        lines += [last.rstrip()] if BAR not in last else []
    return "\n".join([*lines, *(["the bar, when it was seen last:", bar.strip()] if bar else [])])


def masked(name: str, kind: str, text: str, directory: Path) -> str:
    """Put a word in place of what no two runs share; a terminal's lines are broken anew."""
    from tonari.terminal import fill

    text = re.sub(f"\n{BROKEN} *", " ", text).replace(str(directory), "DIRECTORY")
    for pattern, word in MASKS.get(name, ()):
        text = re.sub(pattern, word, text)
    lines = text.split("\n")
    if kind == "terminal":
        lines = [line if "  " in line.strip() else fill(line, COLUMNS) for line in lines]
    return "\n".join(lines) + "\n"


def run_all(directory: Path) -> dict[str, str]:
    """Run every command both ways; returns what each wrote."""
    make_inputs(directory)
    import tonari.ablate.call
    import tonari.bench.command
    import tonari.plan.report
    import tonari.rehearse.report
    import tonari.rows.command
    import tonari.trainer.run.loop  # noqa: F401

    return {
        f"{name}.{kind}": run_in_fork(name, kind, directory) for name in SCREENS for kind in KINDS
    }


@pytest.fixture(scope="module")
def wrote() -> dict[str, str]:
    """What each command wrote, in a process of its own: nobody else's threads are forked."""
    command = [sys.executable, "-m", "tests.tonari.test_screens", "--print"]
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "LINES")}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, timeout=240, check=True
    )
    found: dict[str, str] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCREENS)
def test_a_command_shows_what_its_golden_file_has(
    wrote: dict[str, str], name: str, kind: str
) -> None:
    text, directory = wrote[f"{name}.{kind}"], Path(wrote["directory"])
    shown = seen(text)
    if kind == "terminal":
        too_long = [line for line in shown.split("\n") if len(line.removeprefix(BROKEN)) > COLUMNS]
        assert not too_long
    else:
        assert "\x1b" not in text
    assert masked(name, kind, shown, directory) == (GOLDEN / f"{name}.{kind}.txt").read_text()


def test_every_golden_file_is_of_a_command() -> None:
    names = {f"{name}.{kind}.txt" for name in SCREENS for kind in KINDS}
    assert {path.name for path in GOLDEN.glob("*.txt")} == names


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as made:
        found = run_all(Path(made)) | {"directory": made}
        if "--print" in sys.argv:
            print(json.dumps(found))
        else:
            for name in SCREENS:
                for kind in KINDS:
                    text = masked(name, kind, seen(found[f"{name}.{kind}"]), Path(made))
                    (GOLDEN / f"{name}.{kind}.txt").write_text(text)
