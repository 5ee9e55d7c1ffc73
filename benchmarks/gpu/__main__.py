"""What is measured on a GPU that is at hand for minutes: a list of rows, in the order of worth.

    python -m benchmarks.gpu all --minutes 25      # as many as there is time for; goes on
    python -m benchmarks.gpu images trainer        # these rows alone
    python -m benchmarks.gpu all --tiny            # on a CPU: do they run?
    python -m benchmarks.gpu pack DIR [--dali] [--data FILE ...]    # for a bare machine
    python -m benchmarks.gpu report --page docs/results/gpu.md

A row takes at most eight minutes. What was measured on a card, by a version of torch, is in
OUT/ROW.json and is not measured again, whatever the commit; to do so, remove the file. The figures
of a row are medians of turns that its ways took in one process.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

import torch

from benchmarks.gpu.pack import LIMIT_MIB, pack
from benchmarks.gpu.report import write_page
from benchmarks.gpu.row import MOST_S, Row, RowFile, Setting, run_row

ROWS = ("images", "trainer", "ranks", "study", "blocks", "predicted")
"""By worth."""
GRACE_S = 20.0
"""For a row that is over its time to end by itself."""
LEAST_S = 30.0


def load_row(name: str) -> Row:
    """Import a row."""
    return cast(Row, import_module(f"benchmarks.gpu.{name}"))


def run_all(given: argparse.Namespace) -> None:
    """Run rows, each in a process of its own, until the time is over."""
    ends = time.monotonic() + 60 * given.minutes
    for name in given.rows:
        seconds = min(MOST_S, ends - time.monotonic() - GRACE_S)
        if seconds < LEAST_S:
            print(f"{name}: no time was left", flush=True)
            continue
        command = [
            sys.executable, "-m", "benchmarks.gpu", name, "--seconds", str(seconds),
            "--out", str(given.out), "--data", str(given.data[0]), f"--commit={given.commit}",
            *(["--tiny"] if given.tiny else []),
        ]  # fmt: skip
        print(f"== {name}, at most {seconds:.0f} s", flush=True)
        run_for(command, seconds + GRACE_S)


def run_for(command: Sequence[str], seconds: float) -> None:
    """Run a command, and end it with all that it started when its time is over."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"ended after {seconds:.0f} s", flush=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(argv: Sequence[str] | None = None) -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("rows", nargs="+", metavar="all|ROW...|pack DIR|report")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), help="figures, and work files"
    )
    parser.add_argument("--data", type=Path, nargs="+", default=[Path("data")],
                        help="directory of CIFAR-10; of pack: files to carry")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="as small as it gets, on a CPU too")
    parser.add_argument("--commit", default="", help="of code that lies in no git repository")
    parser.add_argument("--dali", action="store_true", help="carry DALI too, in further loads")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB, help="of a load")
    parser.add_argument("--page", type=Path, default=Path("docs/results/gpu.md"))
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args(argv)
    if given.rows[0] == "pack":
        files = [file for file in given.data if file.is_file()]
        pack(Path(given.rows[1]), files=files, dali=given.dali, limit_mib=given.limit_mib)
        return
    if given.rows[0] == "report":
        write_page(given.page, {name: given.out / f"{name}.json" for name in ROWS})
        return
    if given.rows == ["all"]:
        given.rows = list(ROWS)
    if unknown := set(given.rows).difference(ROWS):
        parser.error(f"found {', '.join(unknown)}, expected all, pack, report or {', '.join(ROWS)}")
    on_gpu = torch.cuda.is_available()
    if not (on_gpu or given.tiny):
        parser.error("torch sees no GPU here, expected one; give --tiny to see that all runs")
    if given.seconds is None:
        run_all(given)
        return
    out = given.out / "tiny" if given.tiny else given.out
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        device="cuda" if on_gpu else "cpu", tiny=given.tiny, work=work.absolute(),
        data=given.data[0].absolute(), ends=time.monotonic() + given.seconds,
    )  # fmt: skip
    for name in given.rows:
        run_row(load_row(name), setting, RowFile(out / f"{name}.json", commit=given.commit))


if __name__ == "__main__":
    main()
