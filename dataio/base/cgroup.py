"""How much memory this process may still take: what the machine has, what its cgroup allows."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 60
"""Version 1 writes a number near 2**63 for no limit."""

FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Of each version: limit, usage, and the part of it that the kernel takes back when asked."""


def memory_room(proc: Path = Path("/proc")) -> int | None:
    """Find how many bytes could still be held in memory, files on a tmpfs included.

    Args:
        proc: Where the kernel shows its figures.

    Returns:
        The least of the machine's available memory and the room below each limit on the way from
        this process's cgroup to the root; None where the kernel shows nothing.
    """
    rooms = [_available(proc), *_cgroup_rooms(proc)]
    known = [room for room in rooms if room is not None]
    return max(min(known), 0) if known else None


def _available(proc: Path) -> int | None:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_rooms(proc: Path) -> Iterator[int]:
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
                yield from _room(directory, kind)


def _mounts(mountinfo: str) -> dict[str, tuple[str, Path]]:
    """Find root and mount point of version 2, and of version 1's memory controller."""
    found = {}
    for line in mountinfo.splitlines():
        mounted, _, described = line.partition(" - ")
        fields, kind = mounted.split(" "), described.split(" ")
        if kind[0] == "cgroup2" or (kind[0] == "cgroup" and "memory" in kind[2].split(",")):
            found[kind[0]] = (fields[3], Path(fields[4]))
    return found


def _room(directory: Path, kind: str) -> Iterator[int]:
    limit_name, usage_name, reclaimable = FILES[kind]
    limit, usage = _read(directory / limit_name).strip(), _read(directory / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= UNLIMITED:
        return
    stat = dict(line.split(" ", 1) for line in _read(directory / "memory.stat").splitlines())
    yield int(limit) - int(usage) + int(stat.get(reclaimable, 0))


def _read(path: Path) -> str:
    # Levels above a container's own, and other kernels, lack some of the files.
    try:
        return path.read_text()
    except OSError:
        return ""
