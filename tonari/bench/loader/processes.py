"""What a tree of processes uses, as the kernel counts it, and what of a file it keeps in memory."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tonari.bench.storage.site.residency import evict as drop_files
from tonari.bench.storage.site.residency import resident_bytes

PROC = Path("/proc")
DROP_CACHES = PROC / "sys/vm/drop_caches"


def tree(roots: Iterable[int]) -> list[int]:
    """List processes and all that they started."""
    children = defaultdict(list)
    for pid in [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]:
        fields = _stat(pid)
        if fields:
            children[int(fields[1])].append(pid)
    found = list(roots)
    for pid in found:
        found += children[pid]
    return found


def cpu_s(roots: Iterable[int]) -> float:
    """Add up the processor time of a tree, ended children included."""
    ticks = 0
    for pid in tree(roots):
        fields = _stat(pid)
        if fields:
            ticks += sum(int(value) for value in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def pss_bytes(roots: Iterable[int]) -> int:
    """Add up the proportional set size of a tree: shared memory counted once."""
    total = 0
    for pid in tree(roots):
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if the process has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def disk_bytes(directory: Path) -> int:
    """Add up the disk space of the files below a directory, links not followed."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def evict(directory: Path) -> str:
    """Drop a directory's files from the page cache.

    As root, all clean pages of the machine are dropped too.

    Returns:
        How it was done, for the report.
    """
    drop_files(_files(directory))
    if os.access(DROP_CACHES, os.W_OK):
        DROP_CACHES.write_text("1")
        return "posix_fadvise and drop_caches"
    return "posix_fadvise"


def resident_fraction(directory: Path) -> float:
    """Measure which part of a directory's bytes lies in the page cache."""
    seen = resident_bytes(_files(directory))
    return (seen.bytes_resident or 0) / seen.bytes_in_files if seen.bytes_in_files else 0.0


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size]
