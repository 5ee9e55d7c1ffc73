"""How often a job that is signalled before its limit queues itself again and goes on.

    python -m tests.lab.requeue --tries 20               # root, iproute2, Slurm; half a minute each

One job of four ranks, by `examples/slurm/train.sbatch` as it is: its script gets the signal of
a time limit, after an epoch or by the limit itself, and the next start goes on from the checkpoint.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.lab.site import Site, has_epochs, open_site, read_epochs, what_is_missing

START_S, STOP_S, LIMIT_S = 200, 120, 120


def requeue(site: Site, tries: int, *, by_limit: bool) -> None:
    """Signal and start again; print a line a try. Raises AssertionError with the job's log."""
    limits = {"SBATCH_TIMELIMIT": "2", "SBATCH_SIGNAL": "B:USR1@80"} if by_limit else {}
    job = site.submit("train.sbatch", "run.epochs=10000", **limits)
    run = site.home / f"runs/tonari-{job}"
    for number in range(1, tries + 1):
        before, began_s = len(read_epochs(run)), time.monotonic()
        site.await_state(job, "RUNNING", within_s=START_S)
        if not by_limit:
            _await_epoch(site, job, before, number)
            site.call("scancel", "--batch", "--signal=USR1", job)
        # By its limit it may be stopped before its first epoch ends, where the machine is busy.
        state = site.await_state(
            job, "PENDING", "FAILED", "TIMEOUT", "CANCELLED", "COMPLETED",
            within_s=LIMIT_S + STOP_S if by_limit else STOP_S,
        )  # fmt: skip
        assert state == "PENDING", f"try {number} ended {state}\n{site.log(job)}"
        print(
            f"try {number}: queued again after {time.monotonic() - began_s:.0f} s and "
            f"{len(read_epochs(run)) - before} epochs", flush=True,
        )  # fmt: skip
        site.start_now(job)
    _await_epoch(site, job, len(read_epochs(run)), tries + 1)
    site.call("scancel", job)
    numbers = [line["epoch"] for line in read_epochs(run)]
    assert numbers == list(range(len(numbers))), "each epoch once"
    print(f"{tries} of {tries}; {len(numbers)} epochs, each once")


def _await_epoch(site: Site, job: str, before: int, number: int) -> None:
    run = site.home / f"runs/tonari-{job}"
    goes_on = f"start {number} goes on after {before} epochs"
    site.wait_for(partial(has_epochs, run, before + 1), goes_on, job, START_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--by-limit", action="store_true", help="by Slurm's own time limit")
    options = parser.parse_args()
    if reason := what_is_missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="tonari-requeue-") as top, open_site(Path(top)) as site:
        requeue(site, options.tries, by_limit=options.by_limit)


if __name__ == "__main__":
    main()
