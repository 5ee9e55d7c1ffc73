"""Write a file so that readers and restarts see the old one or the new one, and know damage.

A *record* is a JSON object that holds its own checksum, and a *table* an Arrow IPC stream with one
behind it: any other program reads both. What does not match its checksum is never taken in.
"""

import contextlib
import ctypes
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from xxhash import xxh3_64, xxh3_64_hexdigest, xxh3_64_intdigest

from dataio.base.errors import DamagedFileError

MAGIC = b"TONARI-1"
"""Between a table and its checksum, which is xxh3_64 of all bytes before, little-endian."""
TRAILER_BYTES = len(MAGIC) + 8


def write_file(path: Path, data: bytes | memoryview | pa.Buffer) -> None:
    """Replace ``path`` atomically and durably: it survives a kill and a power cut."""
    with _replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def _replacing(path: Path, *, sync_name: bool = True) -> Iterator[BinaryIO]:
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb", opener=as_open_as_its_directory) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if sync_name:
        sync_directory(path.parent)


def as_open_as_its_directory(path: str, flags: int) -> int:
    """Open a file that whoever may use its directory may use: 0600 in one of mode 0700."""
    return os.open(path, flags, Path(path).parent.stat().st_mode & 0o666)


def write_json(path: Path, document: object) -> None:
    """Replace a JSON file atomically and durably."""
    write_file(path, json.dumps(document, indent=1).encode())


def write_record(path: Path, record: Mapping[str, object]) -> None:
    """Replace a JSON file that holds its own checksum, atomically and durably."""
    write_json(path, {**record, "checksum": _record_checksum(record)})


def read_record(path: Path) -> dict[str, Any]:
    """Read what `write_record` wrote, without the checksum.

    Raises:
        DamagedFileError: If it does not match its checksum, or has none.
        OSError: If it cannot be read.
    """
    data = path.read_bytes()
    try:
        record = dict(json.loads(data))
        expected = str(record.pop("checksum"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        # Not its repr, which may hold all the bytes that could not be read.
        why = f"{type(error).__name__}: {error}"
        found = f"is no JSON object with a checksum ({why})"
        raise _damaged(path, len(data), found) from error
    found = _record_checksum(record)
    if found != expected:
        raise _damaged(path, len(data), f"has checksum {found}, but says {expected}")
    return record


def _record_checksum(record: Mapping[str, object]) -> str:
    return xxh3_64_hexdigest(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())


def _damaged(path: Path, num_bytes: int, found: str) -> DamagedFileError:
    return DamagedFileError(
        f"{path}: damaged: of {num_bytes} bytes, it {found}; expected what Tonari wrote"
    )


class _Summed:
    """Passes on what is written, and sums it up."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sum = xxh3_64()

    def write(self, data: bytes) -> int:
        self._sum.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def checksum(self) -> bytes:
        return self._sum.intdigest().to_bytes(8, "little")


def write_table(path: Path, table: pa.Table, *, sync_name: bool = True) -> None:
    """Replace a table's file, with its checksum, atomically and durably.

    Args:
        path: Of the file.
        table: What it is to hold.
        sync_name: Off: a power cut may leave the old file, until a file beside it is written with
            this on. Saves a flush.
    """
    with _replacing(path, sync_name=sync_name) as file:
        summed = _Summed(file)
        with pa.ipc.new_stream(summed, table.schema) as writer:
            writer.write_table(table)
        summed.write(MAGIC)
        file.write(summed.checksum())


def read_table(path: Path) -> pa.Table:
    """Read what `write_table` wrote, whole.

    Raises:
        DamagedFileError: If it does not match its checksum.
        OSError: If it cannot be read.
    """
    return parse_table(path, path.read_bytes())


def parse_table(path: Path, data: bytes | mmap.mmap, *, verify: bool = True) -> pa.Table:
    """Read a table in memory, without a copy.

    Args:
        path: Where it comes from, for messages.
        data: The whole file.
        verify: Off where this job has written it, or compared it with its checksum already.

    Raises:
        DamagedFileError: If it does not match its checksum, or is no table.
    """
    end, whole = len(data) - TRAILER_BYTES, memoryview(data)
    if end < 0 or bytes(whole[end:-8]) != MAGIC:
        raise _damaged(path, len(data), "does not end in a checksum")
    if verify:
        found, expected = xxh3_64_intdigest(whole[:-8]), int.from_bytes(whole[-8:], "little")
        if found != expected:
            raise _damaged(
                path, len(data), f"has checksum {found:#018x}, but says {expected:#018x}"
            )
    try:
        return pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(data)[:end])).read_all()
    except pa.ArrowException as error:
        raise _damaged(path, len(data), f"is no Arrow stream ({error})") from error


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


WORTH_BYTES = 1 << 20
"""Shorter runs wait for the flush: a call for each costs more than it saves."""
WRITE = 2
"""``SYNC_FILE_RANGE_WRITE`` of Linux."""


def begin_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Begin to write a part of a file to the disk, and do not wait.

    It makes nothing durable: `os.fdatasync` does, and has less left to do. Does nothing for few
    bytes, and where the kernel has no such call.
    """
    if _sync_file_range is not None and num_bytes >= WORTH_BYTES:
        # What it may say is no matter: the flush says it again.
        _sync_file_range(descriptor, offset, num_bytes, WRITE)


def _find() -> "ctypes._NamedFuncPointer | None":
    found: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


_sync_file_range = _find()
