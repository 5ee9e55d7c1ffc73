"""Start the ranks of one node of a lab, again and again: what was imported need not be again.

Each line of stdin is a job: where its ranks write, their faults by rank, options and environment
(see `tests.dataio.job.live_ranks`), and whether the node is lost with a rank that is killed. Writes
a line with their process ids when they run, and one with their exit statuses when they have ended.
"""

import json
import os
import signal
import sys
from pathlib import Path

from tests.dataio.job.live_ranks import start


def main() -> None:
    """Run job after job."""
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pids = {
            start(
                int(rank), {"RANK": rank, **job["environ"]}, Path(job["out"]), fault,
                job["options"],
            ): rank
            for rank, fault in job["ranks"].items()
        }  # fmt: skip
        print(json.dumps(list(pids)), flush=True)
        statuses: dict[str, int] = {}
        while len(statuses) < len(pids):
            ended, status = os.wait()
            statuses[pids[ended]] = os.waitstatus_to_exitcode(status)
            if statuses[pids[ended]] == -signal.SIGKILL:
                Path(job["out"], "lost").touch()
                for pid, rank in pids.items():
                    if rank not in statuses:
                        os.kill(pid, signal.SIGKILL)
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
