"""What runs behind one mount of `tests/slowfs.py`: passes all on to a directory, slowly, counting.

Arguments: directory, mount point, state, number of the mount, cache mode, seconds that names are
remembered (0: as FUSE does by itself), bytes/s, seconds a read, seconds a metadata operation,
metadata operations/s.
"""

import ctypes.util
import os
import sys
import threading
import time
from pathlib import Path

# The newer one where both are: their options differ.
if ctypes.util.find_library("fuse3"):
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")

import mfusepy

from tests.slowfs import Shared, unmount

DATA, METADATA = 0, 1
THREADS = 64
STATUS = "st_mode st_ino st_nlink st_uid st_gid st_size st_blocks".split()
ROOM = "f_bavail f_bfree f_blocks f_bsize f_favail f_ffree f_files f_flag f_frsize f_namemax"


class SlowFiles:
    """The operations that FUSE calls, from several threads."""

    use_ns = True

    def __init__(
        self,
        root: str,
        shared: Shared,
        bytes_per_s: float,
        read_latency_s: float,
        metadata_latency_s: float,
        metadata_ops_per_s: float,
    ) -> None:
        self._root = root
        self._shared = shared
        self._bytes_per_s, self._ops_per_s = bytes_per_s, metadata_ops_per_s
        self._read_latency_s, self._metadata_latency_s = read_latency_s, metadata_latency_s

    def _metadata(self, kind: str) -> None:
        self._shared.add(kind)
        self._shared.take(METADATA, 1, self._ops_per_s)
        if self._metadata_latency_s:
            time.sleep(self._metadata_latency_s)

    def getattr(self, path: str, file: int | None = None) -> dict[str, int]:
        self._metadata("getattr")
        found = os.lstat(self._root + path)
        times = {f"st_{which}time": getattr(found, f"st_{which}time_ns") for which in "amc"}
        return {name: getattr(found, name) for name in STATUS} | times

    def readdir(self, path: str, file: int) -> list[tuple[str, dict[str, int], int]]:
        self._metadata("readdir")
        directory = Path(self._root + path)
        # An entry without its number is taken for a deleted one.
        entries = [directory / ".", directory / "..", *directory.iterdir()]
        names = [".", "..", *(entry.name for entry in entries[2:])]
        numbers = [{"st_ino": entry.lstat().st_ino} for entry in entries]
        return [(name, number, 0) for name, number in zip(names, numbers, strict=True)]

    def open(self, path: str, flags: int) -> int:
        self._metadata("open")
        return os.open(self._root + path, flags & ~os.O_DIRECT)

    def create(self, path: str, mode: int, flags: int) -> int:
        self._metadata("create")
        return os.open(self._root + path, (flags & ~os.O_DIRECT) | os.O_CREAT, mode)

    def release(self, path: str, file: int) -> None:
        os.close(file)

    def read(self, path: str, length: int, offset: int, file: int) -> bytes:
        self._shared.add("read")
        if self._read_latency_s:
            time.sleep(self._read_latency_s)
        data = os.pread(file, length, offset)
        self._shared.add("read_bytes", len(data))
        self._shared.take(DATA, len(data), self._bytes_per_s)
        return data

    def write(self, path: str, data: bytes, offset: int, file: int) -> int:
        self._shared.add("write")
        self._shared.take(DATA, len(data), self._bytes_per_s)
        written = os.pwrite(file, data, offset)
        self._shared.add("written_bytes", written)
        return written

    def fsync(self, path: str, data_alone: int, file: int) -> None:
        self._metadata("fsync")
        os.fsync(file)

    def truncate(self, path: str, length: int, file: int | None = None) -> None:
        self._metadata("truncate")
        os.truncate(self._root + path, length)

    def unlink(self, path: str) -> None:
        self._metadata("unlink")
        Path(self._root + path).unlink()

    def mkdir(self, path: str, mode: int) -> None:
        self._metadata("mkdir")
        Path(self._root + path).mkdir(mode)

    def rmdir(self, path: str) -> None:
        self._metadata("rmdir")
        Path(self._root + path).rmdir()

    def rename(self, old: str, new: str) -> None:
        self._metadata("rename")
        os.rename(self._root + old, self._root + new)

    def statfs(self, path: str) -> dict[str, int]:
        self._metadata("statfs")
        found = os.statvfs(self._root + path)
        return {name: getattr(found, name) for name in ROOM.split()}


def end_with_the_pipe(mount: Path) -> None:
    """Wait until whoever started this process lets go of it, and end, files open or not."""
    sys.stdin.buffer.read()
    unmount(mount)
    # FUSE's own loop goes on as long as somebody holds a file.
    os._exit(0)


def main() -> None:
    root, mount, state, number, cache, remember_s, *limits = sys.argv[1:]
    threading.Thread(target=end_with_the_pipe, args=[Path(mount)], daemon=True).start()
    with Shared(Path(state), int(number)) as shared:
        options: dict[str, bool | int | str] = {cache: True}
        if float(remember_s):
            options |= {f"{what}_timeout": remember_s for what in ("entry", "negative", "attr")}
        if mfusepy.fuse_version_major > 2:
            options["max_threads"] = THREADS
        files = SlowFiles(root, shared, *map(float, limits))
        mfusepy.FUSE(files, mount, foreground=True, fsname="slowfs", use_ino=True, **options)


if __name__ == "__main__":
    main()
