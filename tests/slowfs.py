"""A slow filesystem that counts: a directory seen through FUSE, throttled, as any user may mount.

Several mounts share their limits, as the nodes of a cluster share a filesystem's servers; each has
page caches of its own. `tests/slow_files.py` is what runs behind a mount.
"""

import contextlib
import fcntl
import importlib.util
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 20.0

KINDS = (
    "getattr open create read write readdir unlink mkdir rmdir rename truncate fsync statfs "
    "read_bytes written_bytes"
).split()
"""What is counted: operations by kind, then bytes."""

BURST_S = 0.02
"""An idle limit lets so many seconds' worth pass at once; it makes up for late wake-ups."""

Cache = Literal["auto_cache", "kernel_cache", "direct_io"]


def what_is_missing() -> str:
    """Say why nothing can be mounted here; empty if it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "a slow filesystem needs /dev/fuse, readable and writable"
    if shutil.which("fusermount3") is None and shutil.which("fusermount") is None:
        return "a slow filesystem needs fusermount3: install fuse3"
    if importlib.util.find_spec("mfusepy") is None:
        return "a slow filesystem needs mfusepy: pip install mfusepy"
    return ""


@dataclass(frozen=True)
class SlowDirectory:
    """The mounts of a directory, while they are there.

    Attributes:
        paths: One by mount, with the same files below.
        state: Where the mounts count.
    """

    paths: list[Path]
    state: Path

    @property
    def path(self) -> Path:
        """The first mount."""
        return self.paths[0]

    def counts(self, mount: int | None = None) -> dict[str, int]:
        """Count what was asked of the filesystem so far, by `KINDS`.

        Args:
            mount: One alone; by default all together.
        """
        with Shared(self.state, mount or 0) as shared:
            chosen = range(len(self.paths)) if mount is None else [mount]
            return {kind: sum(shared.count(m, kind) for m in chosen) for kind in KINDS}


@contextlib.contextmanager
def slowfs(
    source: Path,
    *,
    bytes_per_s: float = 0.0,
    read_latency_s: float = 0.0,
    metadata_latency_s: float = 0.0,
    metadata_ops_per_s: float = 0.0,
    cache: Cache = "auto_cache",
    remember_s: float | None = None,
    num_mounts: int = 1,
) -> Iterator[SlowDirectory]:
    """Mount a directory slowly, elsewhere; unmounted at the end, or when this process ends.

    Args:
        source: What is seen through the mounts.
        bytes_per_s: That all mounts together read and write; 0: no limit.
        read_latency_s: Of every read, before its bytes.
        metadata_latency_s: Of every operation that moves no data of a file.
        metadata_ops_per_s: Of all mounts together; 0: no limit.
        cache: ``"auto_cache"`` keeps a file's pages as long as it does not change,
            ``"kernel_cache"`` always, ``"direct_io"`` never, and every read comes as it was
            asked for.
        remember_s: For how long a node does not ask again for a name, its attributes or that
            there is none; by default for one second, and always again where there is none.
        num_mounts: "Nodes".

    Raises:
        RuntimeError: If it cannot be mounted; says what FUSE wrote.
    """
    with contextlib.ExitStack() as stack:
        own = Path(tempfile.mkdtemp(prefix="slowfs-"))
        # Never as a tree: what is still mounted below would go with it.
        stack.callback(own.rmdir)
        state = own / "state"
        Shared.lay_out(state, num_mounts)
        stack.callback(state.unlink)
        limits = [bytes_per_s, read_latency_s, metadata_latency_s, metadata_ops_per_s]
        paths = [own / f"mount{number}" for number in range(num_mounts)]
        for number, path in enumerate(paths):
            path.mkdir()
            stack.callback(path.rmdir)
            arguments = [source.resolve(), path, state, number, cache, remember_s or 0, *limits]
            stack.enter_context(_mounted(path, [str(argument) for argument in arguments]))
        yield SlowDirectory(paths, state)


@contextlib.contextmanager
def _mounted(path: Path, arguments: list[str]) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.slow_files", *arguments]
    with tempfile.TemporaryFile() as log:
        # It ends when the pipe closes, however this process ends.
        server = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            _await_mount(path, server)
            yield
        except _NotMounted as error:
            log.seek(0)
            said = log.read().decode(errors="replace")
            raise RuntimeError(f"slowfs: {path}: {error}; {said}") from error
        finally:
            unmount(path)
            assert server.stdin is not None
            server.stdin.close()
            try:
                server.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


class _NotMounted(Exception):
    pass


def _await_mount(path: Path, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.is_mount():
        if server.poll() is not None:
            raise _NotMounted(f"its process ended with {server.returncode}")
        if time.monotonic() > deadline:
            raise _NotMounted(f"not mounted within {TIMEOUT_S:g} s")
        time.sleep(0.005)


def unmount(path: Path) -> None:
    """Take a mount away, in use or not; nothing is done where there is none."""
    tool = shutil.which("fusermount3") or shutil.which("fusermount") or "fusermount3"
    # -z: also with files open, as a failed test leaves them.
    subprocess.run([tool, "-u", "-z", str(path)], capture_output=True, timeout=TIMEOUT_S)


class Shared:
    """Counters and limits in a file that all mounts map.

    Each mount writes its own counters alone, under its own lock; the limits are changed under a
    lock on the file. Whoever reads counters takes no lock: a number is written at once.
    """

    LIMITS = 2

    @classmethod
    def lay_out(cls, path: Path, num_mounts: int) -> None:
        path.write_bytes(bytes(8 * (cls.LIMITS + num_mounts * len(KINDS))))

    def __init__(self, path: Path, mount: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memory = mmap.mmap(self._descriptor, 0)
        self._mount = mount
        self._lock = threading.Lock()
        self._whole = memoryview(self._memory)
        self._paid_until = self._whole[: 8 * self.LIMITS].cast("d")
        self._counts = self._whole[8 * self.LIMITS :].cast("q")

    def __enter__(self) -> "Shared":
        return self

    def __exit__(self, *_: object) -> None:
        for view in (self._paid_until, self._counts, self._whole):
            view.release()
        self._memory.close()
        os.close(self._descriptor)

    def count(self, mount: int, kind: str) -> int:
        return self._counts[mount * len(KINDS) + KINDS.index(kind)]

    def add(self, kind: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[self._mount * len(KINDS) + KINDS.index(kind)] += amount

    def take(self, limit: int, amount: float, per_s: float) -> None:
        """Wait until this much may pass: what all mounts take lies end to end in time."""
        if not per_s:
            return
        with self._lock:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            now = time.monotonic()
            paid_until = max(self._paid_until[limit], now - BURST_S) + amount / per_s
            self._paid_until[limit] = paid_until
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        if paid_until > now:
            time.sleep(paid_until - now)
