"""Train a study's cells in several processes, each taking the next one when it has ended its own.

A process reports what it does in lines of JSON on its standard output; its standard input is a pipe
that closes when the process that started it ends, however it ends: then it ends too.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

from tonari.ablate.progress import Event
from tonari.errors import CommandError
from tonari.processes import GRACE_S
from tonari.trainer.errors import ConfigError

AGAIN = 75
"""Exit status of a process that another should take over from: a failed cell may have left its
CUDA context unusable."""

ORPHANED = 70


def physical_cores() -> int:
    """Count the cores that this process may use, threads of one core as one."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(path.read_text() if path.exists() else str(cpu))
    return len(cores)


def visible_gpus() -> list[str]:
    """List the CUDA devices as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    import torch

    return [str(device) for device in range(torch.cuda.device_count())]


class CellProcesses:
    """Training processes and what they say.

    A thread a process puts its lines into the queue; only the main thread reads there.
    """

    def __init__(self, command: Sequence[str], gpus: Sequence[str]) -> None:
        self._command, self._gpus = command, gpus
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._said: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()

    def start(self, number: int) -> None:
        """Start the process of a number, on the GPU that is its turn."""
        environment = dict(os.environ)
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[number % len(self._gpus)]
        process = subprocess.Popen(
            self._command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._running[number] = process
        threading.Thread(target=self._listen, args=(number, process.stdout), daemon=True).start()

    def said(self) -> Iterator[tuple[int, Event | int]]:
        """Yield events, and the exit status of each process that ends, until none is left."""
        while self._running:
            number, line = self._said.get()
            if line is not None:
                yield number, Event(**json.loads(line))
                continue
            process = self._running.pop(number)
            status = process.wait()
            assert process.stdin is not None
            process.stdin.close()
            yield number, status

    def close(self) -> None:
        """End those that still run."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def _listen(self, number: int, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                self._said.put((number, line))
        self._said.put((number, None))


def train_in_processes(
    command: Sequence[str],
    *,
    jobs: int,
    gpus: Sequence[str],
    notify: Callable[[Event], None],
    lost: Callable[[str, str], None],
) -> None:
    """Train in some processes. Blocks until none has anything left to do.

    Args:
        command: What each of them runs; calls `serve`.
        jobs: How many.
        gpus: Names of the GPUs, which they take in turn; none: what this process sees.
        notify: Takes what happens to each cell.
        lost: Called with the file's name of a cell whose process ended amid it, and how that ended,
            before another process is started in its place.

    Raises:
        CommandError: If one of them could not begin; the others go on first.
    """
    at_work: dict[int, str] = {}
    refusals: list[str] = []
    with contextlib.closing(CellProcesses(command, gpus)) as processes:
        for number in range(jobs):
            processes.start(number)
        for number, news in processes.said():
            if isinstance(news, Event) and news.kind == "refused":
                refusals.append(news.error)
            elif isinstance(news, Event):
                at_work[number] = news.cell
                if news.kind != "begun":
                    del at_work[number]
                notify(news)
            elif cell := at_work.pop(number, ""):
                words = f"its process {_ended(news)}"
                lost(cell, words)
                notify(Event(kind="failed", cell=cell, error=words))
                processes.start(number)
            elif news == AGAIN:
                processes.start(number)
            elif news and not refusals:
                refusals.append(
                    f"a training process {_ended(news)} before it could begin; what it said is "
                    f"above. The same command goes on from here"
                )
    if refusals:
        raise CommandError(refusals[0])


def _ended(status: int) -> str:
    if status < 0:
        return f"was ended by signal {-status} ({signal.Signals(-status).name})"
    return f"ended with status {status}"


def serve(train: Callable[[Callable[[Event], None]], None], *, ends_on_failure: bool) -> int:
    """Be one of the processes of `train_in_processes`.

    Args:
        train: Trains cells; is given what takes the news.
        ends_on_failure: Whether a failed cell is this process's last.

    Returns:
        The exit status.
    """
    # Ctrl-C goes to all; the parent answers it, and its end is ours
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # What others print must not come between the lines
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def notify(event: Event) -> None:
        print(json.dumps(asdict(event)), file=events, flush=True)
        if event.kind == "failed" and ends_on_failure:
            raise _EndedByFailure

    try:
        train(notify)
    except _EndedByFailure:
        return AGAIN
    except (CommandError, ConfigError) as error:
        notify(Event(kind="refused", error=str(error)))
        return 1
    return 0


class _EndedByFailure(Exception):
    pass


def _end_with_parent() -> None:
    # Not sys.stdin: its lock, held for ever, would break the interpreter's end
    while os.read(0, 1):
        pass
    os._exit(ORPHANED)
