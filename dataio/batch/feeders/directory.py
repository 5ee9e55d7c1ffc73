"""The directory through which ranks that train find feeders, and each the other's secret.

It lies on a filesystem that all of them see, and is its user's alone. Each feeder keeps a file in
it as long as it serves; a file `OVER` ends all that began before it.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import socket
import stat
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import features

from dataio.base.atomic import write_file
from dataio.base.errors import WorkerError
from dataio.rows.at_once import library
from dataio.rows.jpeg import turbojpeg

OVER = "over"
TRY_S = 5.0
CPU = "instructions"
"""Of `versions`: what torch computes with. Our own pictures are the same with any."""


class Announced(NamedTuple):
    """A feeder, as its file says.

    Attributes:
        name: Of the file.
        host: Where it listens.
        ports: One for each core.
        secret: Hexadecimal; who knows it may have the feeder run anything.
    """

    name: str
    host: str
    ports: tuple[int, ...]
    secret: str

    @property
    def words(self) -> str:
        """Name it in messages."""
        return f"the feeder on {self.host} ({self.name})"


def check_directory(directory: Path) -> None:
    """Refuse a directory that others can read or write; make it where its parent is there.

    Raises:
        WorkerError: If it cannot be made or written, or is not this user's alone.
    """
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
    except OSError as error:
        raise WorkerError(
            f"feeders: {directory} cannot be made ({error.strerror}), expected a directory on a "
            "filesystem that feeders and training nodes see; make the one above it, or correct it"
        ) from error
    owner, mode = found.st_uid, stat.S_IMODE(found.st_mode)
    is_own = stat.S_ISDIR(found.st_mode) and owner == os.getuid() and mode & 0o777 == 0o700
    if not is_own or not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise WorkerError(
            f"feeders: {directory} of user {owner} has mode {mode:04o}, expected a directory that "
            f"user {os.getuid()} alone can read and write (0700), as whoever reads it can run "
            "anything on the feeders; run `chmod 700` on it, or give another"
        )


def announce(directory: Path, host: str, ports: tuple[int, ...], secret: bytes) -> Path:
    """Write a feeder's file, atomically, and remove those of killed ones of this node.

    Returns:
        Its path.
    """
    name = f"feeder-{platform.node()}"
    for other in announced(directory):
        if other.name.rpartition("-")[0] == name:
            try:
                socket.create_connection((other.host, other.ports[0]), TRY_S).close()
            except ConnectionRefusedError:
                (directory / other.name).unlink(missing_ok=True)
            except OSError:  # whether it was killed is not known
                pass
    path = directory / f"{name}-{os.getpid()}.json"
    document = {"host": host, "ports": ports, "secret": secret.hex()}
    write_file(path, json.dumps(document).encode())
    return path


def announced(directory: Path) -> Iterator[Announced]:
    """Read the files of the feeders that are there, in the order of their names."""
    for path in sorted(directory.glob("feeder-*.json")):
        # It may have left since, or NFS may have let go of a file that was replaced.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(path.read_bytes())
            yield Announced(path.name, said["host"], tuple(said["ports"]), said["secret"])


def is_over(directory: Path, own: Path) -> bool:
    """Whether a run has ended since a feeder wrote its own file, or the directory is gone."""
    try:
        began = own.stat().st_mtime_ns
        return (directory / OVER).stat().st_mtime_ns >= began
    except FileNotFoundError:
        return not own.exists()


def end_run(directory: Path) -> None:
    """Have the feeders that are there end."""
    with contextlib.suppress(OSError):
        (directory / OVER).touch()


@functools.cache
def versions() -> dict[str, str]:
    """List whatever can change a byte of a row."""
    root = Path(__file__).parents[2]
    code = hashlib.sha256()
    for path in sorted(
        path for room in ("base", "batch", "rows") for path in root.glob(f"{room}/**/*.py")
    ):
        code.update(path.read_bytes())
    compiled = (root / "rows" / "pictures.c").read_bytes() if library() else b""
    turbo = Path(str(decoder._name)).name if (decoder := turbojpeg()) else "none"
    jpeg = f"{features.version('jpg')}, libjpeg-turbo {features.version('libjpeg_turbo')}"
    return {
        "tonari": f"{_version('tonari')} of source {code.hexdigest()[:12]}",
        "compiled part": hashlib.sha256(compiled).hexdigest()[:12] if compiled else "none",
        "Python": platform.python_version(),
        "machine": platform.machine(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
        "torchvision": _version("torchvision"),
        "Pillow": f"{_version('pillow')} with libjpeg {jpeg}",
        "simplejpeg": f"{_version('simplejpeg')}, beside it {turbo} {_version('turbojpeg')}",
        CPU: torch.backends.cpu.get_cpu_capability(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
