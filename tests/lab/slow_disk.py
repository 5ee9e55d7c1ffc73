"""A disk that a process reads slowly from, by the kernel alone: nothing else takes processors.

Needs root, loop devices and cgroup v1. Throttled are a process's own reads, so that each has a disk
of its own; what it writes is not. Files that are mapped are read once, as long as they fit into
memory: so pages are taken out of it a while after they were asked for.
"""

import contextlib
import ctypes
import os
import subprocess
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from dataio.cache.files import readahead
from dataio.cache.files.readahead import PAGE_BYTES, Readahead, merged

GROUPS = Path("/sys/fs/cgroup/blkio")
IMAGE_BYTES = 256 << 20
KEPT_BATCHES = 16
"""More than are asked for ahead of their step."""
UNMAP = 4
"""Advice of `madvise`: what is read here next is looked up anew."""


@contextlib.contextmanager
def mounted_image(directory: Path) -> Iterator[Path]:
    """Mount a new filesystem that lies in a file; unmounted at the end."""
    directory.mkdir()
    image, mount = directory / "image", directory / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)


@contextlib.contextmanager
def read_slowly(mount: Path, bytes_per_s: float) -> Iterator[Callable[[], int]]:
    """Let this process read from a mount at so much, and have each batch's rows read anew.

    Yields:
        Counts the bytes that were read so far.
    """
    device = mount.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    group = GROUPS / f"tonari-{os.getpid()}"
    group.mkdir()

    def count() -> int:
        lines = (group / "blkio.throttle.io_service_bytes").read_text().splitlines()
        return sum(int(line.split()[2]) for line in lines if line.startswith(f"{number} Read"))

    (group / "blkio.throttle.read_bps_device").write_text(f"{number} {round(bytes_per_s)}")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        # As where memory cannot hold the rows: they are asked for page by page
        with (
            mock.patch.object(readahead, "MEMORY_FRACTION", 0.0),
            mock.patch.object(Readahead, "_advise", _forgetful(Readahead._advise)),
        ):
            yield count
    finally:
        (GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


Advise = Callable[[Readahead, Path, NDArray[np.int64], NDArray[np.int64]], None]


def _forgetful(plain: Advise) -> Advise:
    """Ask for pages of rows, and take out of memory those that were asked for a while ago."""
    asked: defaultdict[Path, deque[list[tuple[int, int]]]] = defaultdict(deque)
    madvise = ctypes.CDLL(None).madvise

    def advise(
        own: Readahead, path: Path, start: NDArray[np.int64], stop: NDArray[np.int64]
    ) -> None:
        plain(own, path, start, stop)
        # Columns of a few bytes a row would stay in any memory
        if not path.name.startswith("heap"):
            return
        if path not in asked:
            # As it was written
            forget(own, path, [(0, -(-path.stat().st_size // PAGE_BYTES))])
        asked[path].append(merged(start, stop))
        if len(asked[path]) > KEPT_BATCHES:
            forget(own, path, asked[path].popleft())

    def forget(own: Readahead, path: Path, runs: list[tuple[int, int]]) -> None:
        mapped = _mapped_at(path)
        for first, last in runs:
            for address, mapped_bytes in mapped:
                at, size = address + first * PAGE_BYTES, (last - first) * PAGE_BYTES
                part = min(size, mapped_bytes - first * PAGE_BYTES)
                madvise(ctypes.c_void_p(at), ctypes.c_size_t(part), UNMAP)
            # Takes out what is mapped nowhere
            os.posix_fadvise(own._files[path], first * PAGE_BYTES, size, os.POSIX_FADV_DONTNEED)

    return advise


def _mapped_at(path: Path) -> list[tuple[int, int]]:
    """Find where a file is mapped from its beginning, and how many bytes of it."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    found = [line[0].split("-") for line in lines if line[-1] == str(path)]
    return [(int(start, 16), int(stop, 16) - int(start, 16)) for start, stop in found]
