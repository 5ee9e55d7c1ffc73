"""What a figure depends on beside the code: machine, versions, commit, date."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "numpy", "pyarrow", "simplejpeg", "webdataset", "mpi4py")
CPUINFO = Path("/proc/cpuinfo")


def describe_machine(directory: Path) -> dict[str, object]:
    """Describe this machine and this code.

    Args:
        directory: Where the files are that were read.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(Path(__file__).parent),
        "cpu": _value(CPUINFO, "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "directory": str(directory),
    }


def commit(directory: Path) -> str | None:
    """Name the commit that the code is at, with "+" where it was changed; None outside git."""
    try:
        ended = subprocess.run(
            ["git", "-C", str(directory), "describe", "--always", "--dirty=+", "--abbrev=12"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except OSError:
        return None
    return ended.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _value(path: Path, name: str) -> str | None:
    for line in path.read_text().splitlines() if path.exists() else []:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
