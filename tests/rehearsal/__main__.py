"""Rehearse many schedules, each in a process of its own, and shorten those that fail.

python -m tests.rehearsal --seeds 0:1000 [--twice] [--live]
"""

import argparse
import logging
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.faults.kill.harness import quick_directory
from tests.rehearsal.apart import in_process
from tests.rehearsal.live import rehearse_live
from tests.rehearsal.rehearsal import Audited, rehearse
from tests.rehearsal.schedules import (
    LiveSchedule,
    Schedule,
    draw_live,
    draw_schedule,
    shorter,
    shorter_live,
)
from tests.rehearsal.settings import small_and_quick


def attempt(schedule: Schedule | LiveSchedule) -> str:
    """Rehearse in a process of its own: the digest, or what went wrong after a "!"."""

    def run() -> str:
        logging.disable(logging.ERROR)
        root = Path(tempfile.mkdtemp(dir=quick_directory(), prefix="rehearsal-"))
        try:
            with small_and_quick():
                found = _rehearse(schedule, root)
            happened, ended = " ".join(found.happened), "; ".join(found.ended)
            return f"{found.digest} {found.num_points} {happened}; {ended}"
        except BaseException as error:
            return f"!{type(error).__name__}\n{traceback.format_exc()[-3000:]}"
        finally:
            shutil.rmtree(root, ignore_errors=True)

    return in_process(run) or "!the process ended without a word"


def _rehearse(schedule: Schedule | LiveSchedule, root: Path) -> Audited:
    if isinstance(schedule, LiveSchedule):
        return rehearse_live(schedule, root)
    return rehearse(schedule, root)


def warm_up() -> None:
    """Do here once, without faults, what takes each process longer the first time."""
    for seed in range(3):
        schedule = draw_schedule(seed)
        undisturbed = replace(schedule, starts=schedule.starts[-1:])
        with tempfile.TemporaryDirectory(dir=quick_directory()) as root, small_and_quick():
            rehearse(undisturbed, Path(root))


def shortest(schedule: Schedule | LiveSchedule, found: str) -> Schedule | LiveSchedule:
    """Leave out of a schedule that fails what it fails without, with the same kind of error."""
    less: Iterator[Schedule | LiveSchedule] = (
        shorter_live(schedule) if isinstance(schedule, LiveSchedule) else shorter(schedule)
    )
    for fewer in less:
        if attempt(fewer).splitlines()[0] == found.splitlines()[0]:
            return shortest(fewer, found)
    return schedule


def main() -> int:
    """Print what fails; the status says whether anything did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:100", help="first:end")
    parser.add_argument("--twice", action="store_true", help="compare two runs of each seed")
    parser.add_argument("--live", action="store_true", help="jobs under `dataio.live`")
    parser.add_argument("--verbose", action="store_true", help="a line a seed")
    args = parser.parse_args()
    first, end = map(int, args.seeds.split(":"))
    started_s, num_wrong = time.process_time(), 0
    warm_up()
    for seed in range(first, end):
        schedule = draw_live(seed) if args.live else draw_schedule(seed)
        found = attempt(schedule)
        if args.twice and not found.startswith("!") and attempt(schedule) != found:
            found = "!the second run was another one"
        if args.verbose:
            print(f"{schedule}\n    {found[:200]}", flush=True)
        if found.startswith("!"):
            num_wrong += 1
            print(f"{schedule}\n{found[1:]}\nshortest: {shortest(schedule, found)}", flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took_s = time.process_time() - started_s + used.ru_utime + used.ru_stime
    print(f"{end - first} schedules in {took_s:.0f} s of processor, {num_wrong} of them wrong")
    return num_wrong > 0


if __name__ == "__main__":
    sys.exit(main())
