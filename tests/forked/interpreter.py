"""Stands for `python` on a command line: a zygote forks the process that it asks for.

    EXECUTABLE [-u] (SCRIPT | -m MODULE | -c CODE) ARGUMENTS...

What a process inherits goes with the request: variables, open files, working directory, limits,
which signals are ignored, cores, niceness.
Signals are passed on, and this process ends as the forked one ends. If this one is killed, the
zygote kills the forked one. What a zygote cannot give (see `refusal` in `zygote.py`) begins anew:
then this process becomes Python itself. Imports little, so it starts in milliseconds.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EXECUTABLE = "python"
"""Name of what runs ``main``, beside the sockets; see ``ForkedPython.command``."""
RANKS = ("PMI_RANK", "RANK")
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
PASSED_ON = tuple(
    getattr(signal, f"SIG{name}") for name in ("HUP", "INT", "QUIT", "ABRT", "USR1", "USR2", "TERM")
)
OWN = (
    "JE_ARROW_MALLOC_CONF", "HDF5_PLUGIN_PATH", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
"""Variables that packages set for themselves as they are imported, in a test's process too."""
LENGTH = struct.Struct("!Q")
MOST_FILES = 200
"""What one message can carry is 253."""


class Refused(Exception):
    """The process has to begin anew."""


class Forked:
    """A process that a zygote has forked."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._rest = connection, b""
        answer = self._read()
        if "refused" in answer:
            raise Refused(answer["refused"])
        self.pid: int = answer["pid"]

    def wait(self) -> int:
        """Wait for its end: its exit status, or less than 0 for the signal that ended it. Blocks.

        Raises:
            TimeoutError: If it runs after the time that ``limit`` has set.
        """
        return int(self._read()["status"])

    def limit(self, limit_s: float) -> None:
        """Set how long the next wait may take."""
        self._connection.settimeout(max(limit_s, 0.001))

    def kill(self) -> None:
        """Let the zygote kill it, with all of its group; ``wait`` for it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._connection.close()

    def fileno(self) -> int:
        return self._connection.fileno()

    def _read(self) -> dict[str, Any]:
        while b"\n" not in self._rest:
            more = self._connection.recv(4096)
            if not more:
                raise ConnectionError("the zygote has ended, see what it wrote")
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer


def ask(
    path: str,
    arguments: Sequence[str],
    *,
    environ: Mapping[str, str],
    files: Mapping[int, int],
    ignored: Sequence[int],
) -> Forked:
    """Ask the zygote at a socket for a process.

    Args:
        path: Of the socket.
        arguments: As Python's own.
        environ: All of its variables.
        files: Its open files: by its number, the number here.
        ignored: Signals that it ignores as it begins.

    Raises:
        Refused: If it has to begin anew.
    """
    request = {
        "arguments": list(arguments),
        "environ": dict(environ),
        "directory": str(Path.cwd()),
        "mask": _mask(),
        "limits": limits(),
        "place": place(),
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "files": list(files),
        "ignored": list(ignored),
    }
    words = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    socket.send_fds(connection, [LENGTH.pack(len(words))], list(files.values()))
    connection.sendall(words)
    try:
        return Forked(connection)
    except BaseException:
        connection.close()
        raise


def ignored() -> list[int]:
    """Which signals this process ignores, as those that it starts do."""
    return [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]


def limits() -> dict[str, list[int]]:
    """The limits of this process, by the names of `resource`."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: list(resource.getrlimit(getattr(resource, name))) for name in names}


def place() -> dict[str, Any]:
    """Where this process runs, which a forked one cannot choose."""
    paths = [Path("/proc/self/ns", name) for name in NAMESPACES]
    return {
        "namespaces": [str(path.readlink()) for path in paths if path.is_symlink()],
        "cgroup": Path("/proc/self/cgroup").read_text(),
        "users": [*os.getresuid(), *os.getresgid()],
    }


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _open_files() -> list[int]:
    numbers = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    return [number for number in numbers if _is_inherited(number)]


def _is_inherited(number: int) -> bool:
    with contextlib.suppress(OSError):
        return os.get_inheritable(number)
    return False


def main(paths: Sequence[str], arguments: list[str]) -> None:
    rank = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    files = _open_files()
    # A signal that comes just before a wait for the answer would be seen after it alone.
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signals: list[int] = []
    forked: Forked | None = None

    def pass_on(number: int, _frame: object) -> None:
        signals.append(number)
        if forked is not None:
            _send(forked, signals)

    not_heard = ignored()
    kept = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        if len(files) > MOST_FILES:
            raise Refused("too many open files")
        # Not all ranks are of the same zygote: of one, all would hash strings alike.
        forked = ask(
            paths[int(rank) % len(paths)], arguments, environ=os.environ,
            files={number: number for number in files}, ignored=not_heard,
        )  # fmt: skip
    except Refused:
        for number, handler in kept.items():
            signal.signal(number, handler)
        os.execv(sys.executable, [sys.executable, *arguments])
    _send(forked, signals)
    # Whoever reads or writes the other end of a pipe must see that the forked process closes its.
    _close_all_but({forked.fileno(), woken, wakes}, last=max([*files, forked.fileno(), wakes]))
    while forked.fileno() not in select.select([forked.fileno(), woken], [], [])[0]:
        os.read(woken, 4096)
    status = forked.wait()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _close_all_but(kept: set[int], *, last: int) -> None:
    first = 0
    for number in [*sorted(kept), last + 1]:
        os.closerange(first, number)
        first = number + 1


def _send(forked: Forked, signals: list[int]) -> None:
    while signals:
        with contextlib.suppress(ProcessLookupError):
            os.kill(forked.pid, signals.pop(0))
