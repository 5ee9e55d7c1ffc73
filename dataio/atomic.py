"""Write a small file so that readers and restarts see the old one or the new one."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa


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


def write_table(path: Path, table: pa.Table, *, sync_name: bool = True) -> None:
    """Replace an Arrow IPC file atomically and durably.

    Args:
        path: Of the file.
        table: What it is to hold.
        sync_name: Off: a power cut may leave the old file, until a file beside it is written with
            this on. Saves a flush.
    """
    with (
        _replacing(path, sync_name=sync_name) as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)


def read_table(path: Path) -> pa.Table:
    """Read an Arrow IPC file whole."""
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
