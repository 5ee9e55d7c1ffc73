"""Processes of this host: notice that one has ended, and end one that was stopped."""

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterable
from pathlib import Path

from dataio.job.judge import Heartbeat


def host_name() -> str:
    """Name this host and its process numbers: one means something only where both are the same."""
    return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"


def open_process(heartbeat: Heartbeat) -> int | None:
    """Open a process of this host, readable once it has ended; None where that cannot be."""
    try:
        return os.pidfd_open(heartbeat.pid) if heartbeat.host == host_name() else None
    except OSError:
        return None


def first_ended(processes: Iterable[int], *, wait_s: float) -> int | None:
    """Wait for the end of an opened process, and return the first; None if all live.

    Where several have ended, a launcher has ended one because of the other: a caller that always
    waits here sees the first alone.
    """
    poll = select.poll()
    for process in processes:
        poll.register(process, select.POLLIN)
    ended = poll.poll(wait_s * 1000)
    return ended[0][0] if ended else None


def end_stopped(heartbeat: Heartbeat) -> None:
    """End the process of a silent rank if it lies on this host and is stopped.

    A stopped process takes no polite signal: its launcher would wait for it for half a minute.
    """
    state = Path(f"/proc/{heartbeat.pid}/stat")
    with contextlib.suppress(OSError):
        if heartbeat.host == host_name() and state.read_text().rpartition(")")[2].split()[0] == "T":
            os.kill(heartbeat.pid, signal.SIGKILL)
