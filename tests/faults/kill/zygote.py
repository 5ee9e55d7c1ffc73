"""Starts ranks that have imported everything already: a job begins in milliseconds.

Reads requests as lines of JSON, forks the ranks of each, waits for them as a launcher does, and
answers in a line. Has one thread, and has neither opened a loader nor met other ranks, so a forked
process is as good as a new one.
"""

import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# What the jobs import, imported once.
import tests.faults.kill.job

MODULES = {"loader": "tests.faults.kill.job", "train": "tests.faults.kill.train_job"}
KILLED = -int(signal.SIGKILL)

assert tests.faults.kill.job


def serve() -> dict[str, Any] | None:
    """Answer requests until there are no more; in a forked rank, hand back what it is to do."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        _check_threads()
        pids: dict[int, int] = {}
        for rank in range(request["ranks"]):
            pid = os.fork()
            if not pid:
                return request | {"rank": rank}
            pids[pid] = rank
        print(json.dumps(_wait(pids, limit_s=request["limit_s"])), flush=True)
    return None


def _check_threads() -> None:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(names) != 1:
        raise RuntimeError(f"zygote: has the threads {names}, expected one; import less beforehand")


def _wait(pids: dict[int, int], *, limit_s: float) -> dict[str, Any]:
    """Wait for all ranks; the first that fails ends the others, as a launcher does."""
    statuses: dict[int, int] = {}
    deadline, timed_out = time.monotonic() + limit_s, False
    while len(statuses) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            left_s = deadline - time.monotonic()
            if timed_out or left_s > 0:
                signal.sigtimedwait([signal.SIGCHLD], max(left_s, 1.0))
            else:
                timed_out = True
                _end(pids, statuses)
            continue
        if pid not in pids:
            continue
        code = os.waitstatus_to_exitcode(status)
        statuses[pids[pid]] = code
        if code:
            _end(pids, statuses)
    return {"statuses": [statuses[rank] for rank in range(len(pids))], "timed_out": timed_out}


def _end(pids: dict[int, int], statuses: dict[int, int]) -> None:
    for pid, rank in pids.items():
        if rank not in statuses:
            os.kill(pid, signal.SIGKILL)


def become_rank(request: dict[str, Any]) -> None:
    """Be one rank of a job, as torchrun would have started it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    attempt, rank, ranks = Path(request["attempt"]), request["rank"], request["ranks"]
    output = os.open(attempt / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((0, nothing), (1, output), (2, output)):
        os.dup2(new, old)
    os.environ.update(request["environment"])
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{attempt}/store", rank=rank, world_size=ranks
        )
    importlib.import_module(MODULES[request["what"]]).run(request["argument"] | {"rank": rank})
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    for module in MODULES.values():
        importlib.import_module(module)
    gc.freeze()
    request = serve()
    if request is not None:
        become_rank(request)


if __name__ == "__main__":
    main()
