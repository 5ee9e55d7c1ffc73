"""Build the folder that is carried to a bare machine: loads, each below a limit.

The first load has the committed checkout, the wheels that a machine with torch, NumPy and what
usually lies beside them lacks, and `begin.py`, which puts all together there. Files that fit no
load are cut into parts. Pictures and texts are made there, from a seed.
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
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5))
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
        loads = write_loads(directory, carried, limit_bytes=int(limit_mib * MIB))
    shutil.copy(Path(__file__).with_name("begin.py"), directory / "load-1")
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
    """Put each file into the first load that it fits, in parts where it fits none: their bytes."""
    loads: list[int] = []
    for file in files:
        content = file.read_bytes()
        count = max(-(-len(content) // limit_bytes), 1)
        size = -(-len(content) // count)
        for number in range(count):
            part = content[number * size : (number + 1) * size]
            fits = (n for n, there in enumerate(loads) if there + len(part) <= limit_bytes)
            chosen = next(fits, len(loads))
            loads += [0] * (chosen == len(loads))
            loads[chosen] += len(part)
            load = directory / f"load-{chosen + 1}"
            load.mkdir(parents=True, exist_ok=True)
            (load / f"{file.name}.{number + 1}of{count}").write_bytes(part)
    return loads
