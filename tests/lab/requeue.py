"""How often a job that is signalled before its limit queues itself again and goes on.

    python -m tests.lab.requeue --tries 20               # root, iproute2, Slurm; half a minute each

One job of four ranks, by `examples/slurm/train.sbatch` as it is: after each epoch its script gets
the signal of a time limit, and the next start goes on from the checkpoint.
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.lab.site import Site, has_epochs, open_site, what_is_missing

START_S, STOP_S = 200, 120


def requeue(site: Site, tries: int, *, by_limit: bool) -> None:
    """Signal and start again; print a line a try. Raises AssertionError with the job's log."""
    limits = {"SBATCH_TIMELIMIT": "2", "SBATCH_SIGNAL": "B:USR1@80"} if by_limit else {}
    job = site.submit("train.sbatch", "run.epochs=10000", **limits)
    run = site.home / f"runs/tonari-{job}"
    for number in range(1, tries + 1):
        before, began_s = len(epochs(run)), time.monotonic()
        goes_on = f"start {number} goes on after {before} epochs"
        site.wait_for(partial(has_epochs, run, before + 1), goes_on, job, START_S)
        trained_s = time.monotonic()
        if not by_limit:
            site.call("scancel", "--batch", "--signal=USR1", job)
        state = site.await_state(job, "PENDING", "FAILED", "TIMEOUT", within_s=STOP_S)
        assert state == "PENDING", f"try {number} ended {state}\n{site.log(job)}"
        print(
            f"try {number}: an epoch after {trained_s - began_s:.0f} s, queued again after "
            f"{time.monotonic() - trained_s:.0f} s more", flush=True,
        )  # fmt: skip
        site.start_now(job)
    site.call("scancel", job)
    assert epochs(run) == list(range(len(epochs(run)))), "each epoch once"
    print(f"{tries} of {tries}; {len(epochs(run))} epochs, each once")


def epochs(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line["epoch"] for line in map(json.loads, lines) if line["kind"] == "epoch"]


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
