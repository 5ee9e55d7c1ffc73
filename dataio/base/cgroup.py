"""How much memory this process may take: what the machine has, what its cgroup allows."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 60
"""Version 1 writes a number near 2**63 for no limit."""

FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Of each version: limit, usage, and the part of it that the kernel takes back when asked."""


def memory_limit(proc: Path = Path("/proc")) -> int:
    """Find how many bytes of memory this process may use at most, whatever is in use now.

    Args:
        proc: Where the proc filesystem is mounted.

    Returns:
        The least of the machine's memory and every limit on the way from this process's cgroup to
        the root.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for _, _, limit in _limits(proc))])


def memory_room(proc: Path = Path("/proc")) -> int | None:
    """Find how many bytes could still be held in memory, files on a tmpfs included.

    Args:
        proc: Where the proc filesystem is mounted.

    Returns:
        The least of the machine's available memory and the room below each limit on the way from
        this process's cgroup to the root; None where neither is known.
    """
    rooms = [_available(proc), *(_room(*found) for found in _limits(proc))]
    known = [room for room in rooms if room is not None]
    return max(min(known), 0) if known else None


def _available(proc: Path) -> int | None:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _limits(proc: Path) -> Iterator[tuple[Path, str, int]]:
    """List the limits from this process's cgroup up: directory, version, bytes."""
    mounts = _mounts(_read(proc / "self" / "mountinfo"))
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, controllers, name = line.split(":", 2)
        kind = "cgroup2" if number == "0" and not controllers else "cgroup"
        if kind not in mounts or (kind == "cgroup" and "memory" not in controllers.split(",")):
            continue
        root, mount_point = mounts[kind]
        path, inside = PurePosixPath(name), PurePosixPath(root)
        # A container sees its own cgroup as the root of the mount.
        below = path.relative_to(inside) if path.is_relative_to(inside) else PurePosixPath()
        leaf = mount_point / below
        for directory in (leaf, *leaf.parents):
            if directory.is_relative_to(mount_point):
                limit = _read(directory / FILES[kind][0]).strip()
                if limit.isdigit() and int(limit) < UNLIMITED:
                    yield directory, kind, int(limit)


def _mounts(mountinfo: str) -> dict[str, tuple[str, Path]]:
    """Find root and mount point of version 2, and of version 1's memory controller."""
    found = {}
    for line in mountinfo.splitlines():
        mounted, _, described = line.partition(" - ")
        fields, kind = mounted.split(" "), described.split(" ")
        if kind[0] == "cgroup2" or (kind[0] == "cgroup" and "memory" in kind[2].split(",")):
            found[kind[0]] = (fields[3], Path(fields[4]))
    return found


def _room(directory: Path, kind: str, limit: int) -> int | None:
    _, usage_name, reclaimable = FILES[kind]
    usage = _read(directory / usage_name).strip()
    if not usage.isdigit():
        return None
    stat = dict(line.split(" ", 1) for line in _read(directory / "memory.stat").splitlines())
    return limit - int(usage) + int(stat.get(reclaimable, 0))


def _read(path: Path) -> str:
    # Levels above a container's own, and other kernels, lack some of the files.
    try:
        return path.read_text()
    except OSError:
        return ""
