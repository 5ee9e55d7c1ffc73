"""Shared memory that MPICH leaves on a node when its ranks are killed: found, and given back."""

import contextlib
import logging
import os
import re
import time
from pathlib import Path
from stat import S_ISREG

log = logging.getLogger(__name__)

SHM, PROC = Path("/dev/shm"), Path("/proc")
NAME = re.compile(r"mpich_shm_[0-9a-f]+_\d+")
OLD_S = 600.0
"""A job that starts makes the file before its other ranks open it by name; later none needs it."""


def abandoned_files(directory: Path = SHM) -> list[Path]:
    """List this user's files of MPICH that no process has mapped, and no starting one will.

    What a process in another container has mapped is not seen: nor does it need the name any more.
    """
    before = time.time() - OLD_S
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # its job has ended meanwhile
            stat = path.lstat() if NAME.fullmatch(path.name) else None
            if stat and S_ISREG(stat.st_mode) and stat.st_uid == os.getuid():
                found += [path] * (stat.st_mtime < before)
    mapped = _mapped() if found else ""
    return [path for path in found if path.name not in mapped]


def remove_abandoned(directory: Path = SHM) -> None:
    """Remove what `abandoned_files` lists."""
    for path in abandoned_files(directory):
        log.info("%s: removed, left by an MPI job of this user that was killed", path)
        path.unlink(missing_ok=True)


def _mapped() -> str:
    """List what processes have mapped, as far as this user may know: all of its own."""
    texts = []
    for maps in PROC.glob("[0-9]*/maps"):
        # It has ended, or is another user's.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            texts.append(maps.read_text())
    return "".join(texts)
