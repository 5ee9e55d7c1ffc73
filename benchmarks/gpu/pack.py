"""Build the folder that is carried to a bare machine: loads, each below a limit.

The first load has the committed checkout, the wheels that a machine with torch, NumPy and what
usually lies beside them lacks, and `begin.py`, which puts all together there. A file that a load
has no room for goes on in the next. Pictures and texts are made there, from a seed.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tonari.bench.errors import BenchError

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
LIMIT_MIB = 60.0
PYTHON = "3.12"
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5)),
    *(f"manylinux{name}_x86_64" for name in (2014, 2010, 1)),
)
LACKED = (
    "simplejpeg", "turbojpeg", "webdataset", "xxhash", "tyro", "msgspec", "fsspec", "pyarrow",
)  # fmt: skip
DALI = ("nvidia-dali-cuda130",)
THERE = (
    "torch", "numpy", "pyyaml", "rich", "pygments", "markdown_it_py", "mdurl", "typing_extensions",
    "packaging", "six", "wheel",
)  # fmt: skip
"""What those need that the machine has."""


def pack(directory: Path, *, files: Sequence[Path], dali: bool, limit_mib: float) -> None:
    """Write the loads.

    Args:
        directory: Where; it must not be there.
        files: To carry beside the checkout and the wheels, such as CIFAR-10.
        dali: Whether to carry DALI, some 260 MB.
        limit_mib: Of each load.

    Raises:
        BenchError: If it is there.
    """
    if directory.exists():
        raise BenchError(f"{directory}: is there, expected a new directory; name another")
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        checkout = scratch / "checkout.tar.gz"
        archive = [
            "git",
            "-C",
            str(ROOT),
            "archive",
            "--format=tar.gz",
            "-o",
            str(checkout),
            "HEAD",
        ]
        subprocess.run(archive, check=True)
        carried = [checkout, *download(LACKED, scratch / "lacked"), *files]
        carried += download(DALI, scratch / "dali") if dali else []
        begin = Path(__file__).with_name("begin.py")
        limit_bytes = int(limit_mib * MIB) - begin.stat().st_size
        loads = write_loads(directory, carried, limit_bytes=limit_bytes)
    shutil.copy(begin, directory / "load-1")
    for number, num_bytes in enumerate(loads, 1):
        print(f"{directory / f'load-{number}'}: {num_bytes / MIB:.1f} MiB")


def download(names: Sequence[str], directory: Path) -> list[Path]:
    """Fetch wheels and what they need that the machine has not, the smallest first."""
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--python-version", PYTHON,
        "--only-binary=:all:", "--implementation", "cp", *platforms, "-d", str(directory), *names,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    wheels = [
        path for path in directory.glob("*.whl") if path.name.split("-")[0].lower() not in THERE
    ]
    return sorted(wheels, key=lambda path: path.stat().st_size)


def write_loads(directory: Path, files: Sequence[Path], *, limit_bytes: int) -> list[int]:
    """Fill one load after the other, and cut a file where one is full: the bytes of each."""
    loads: list[int] = []
    for file in files:
        content, parts = file.read_bytes(), list[tuple[int, bytes]]()
        while content or not parts:
            if not loads or loads[-1] == limit_bytes:
                loads.append(0)
                (directory / f"load-{len(loads)}").mkdir(parents=True)
            part = content[: limit_bytes - loads[-1]]
            content, loads[-1] = content[len(part) :], loads[-1] + len(part)
            parts.append((len(loads), part))
        for number, (load, part) in enumerate(parts, 1):
            path = directory / f"load-{load}" / f"{file.name}.{number}of{len(parts)}"
            path.write_bytes(part)
    return loads
