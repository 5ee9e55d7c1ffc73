"""The files of a log of rows, and how each is written and read whole.

    log.jsonl           a line of JSON for each loader and each attempt, with its checksum
    steps               attempt and step that rank 0 was delivered last, and their checksum, written
                        over at each step
    node-K.bin          what an epoch hides, and weights, of the sampling group of node K
    padded-R.jsonl      a line for each batch of rank R of which some rows could not be read
    excluded-NAME.bin   samples that were left out for good
    costs-NAME.bin      what rows cost, where batches are made to cost alike

Rank 0 writes all but ``node-K.bin``, which the first rank of node K appends to, and
``padded-R.jsonl``, which rank R does.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from dataio.base.atomic import write_file
from dataio.base.errors import DamagedFileError, StateError
from dataio.base.lines import checked_line, read_checked_lines

LOG, STEPS = "log.jsonl", "steps"
HEAD = struct.Struct("<4sqqQ")
"""Of a selection: MAGIC, attempt, bytes that follow, their checksum."""
MAGIC = b"TRL1"
PLACE = struct.Struct("<qq")
CHECKSUM = struct.Struct("<Q")
NOTHING = (-1, 0)
"""The place before a log's first attempt: a missing file of steps is damage, not this."""
READS = 3


def write_line(descriptor: int, line: Mapping[str, object], *, is_apart: bool) -> None:
    """Append a line with its checksum, behind an empty one where it is to stand apart."""
    whole = (b"\n" if is_apart else b"") + checked_line(line).encode() + b"\n"
    if os.write(descriptor, whole) < len(whole):
        raise OSError(f"no room for {len(whole)} bytes")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the whole lines; what a kill or a full disk cut off is none.

    Raises:
        StateError: If a line is damaged.
    """
    try:
        yield from read_checked_lines(path)
    except DamagedFileError as error:
        raise damaged(path, str(error).removeprefix(f"{path}: ")) from error


def pack_place(log: str, attempt: int, step: int) -> bytes:
    """Make the content of the file of steps of a log by its name."""
    place = PLACE.pack(attempt, step)
    return place + CHECKSUM.pack(xxh3_64_intdigest(place + log.encode()))


def read_place(path: Path, log: str) -> tuple[int, int] | None:
    """Read which attempt and step was delivered last; None: nothing was.

    Args:
        path: The file of steps.
        log: Name of the log: the file of another one is none.

    Raises:
        StateError: If it is missing or damaged.
    """
    why = ""
    for _ in range(READS):  # a run that writes it may be in the midst
        try:
            data = path.read_bytes()
        except OSError as error:
            raise damaged(path, f"it cannot be read ({error})") from error
        place, checksum = data[: PLACE.size], data[PLACE.size :]
        if len(data) != PLACE.size + CHECKSUM.size:
            why = f"it has {len(data)} bytes, expected {PLACE.size + CHECKSUM.size}"
        elif CHECKSUM.pack(xxh3_64_intdigest(place + log.encode())) != checksum:
            why = "it does not match its checksum, or is of another log"
        else:
            attempt, step = PLACE.unpack(place)
            return None if (attempt, step) == NOTHING else (attempt, step)
    raise damaged(path, why)


def heads(descriptor: int) -> Iterator[tuple[int, int, int, int]]:
    """Walk through the whole selections of a file: attempt, first byte, checksum, end."""
    start, size = 0, os.fstat(descriptor).st_size
    while start + HEAD.size <= size:
        magic, attempt, num_bytes, checksum = HEAD.unpack(os.pread(descriptor, HEAD.size, start))
        stop = start + HEAD.size + num_bytes
        if magic != MAGIC or num_bytes < 0 or stop > size:
            return
        yield attempt, start + HEAD.size, checksum, stop
        start = stop


def write_once(path: Path, values: NDArray[np.uint8]) -> None:
    """Write bytes with their checksum, unless they are there."""
    if not path.exists():
        data = zlib.compress(values.tobytes(), 1)
        write_file(path, xxh3_64_intdigest(data).to_bytes(8, "little") + data)


def read_once(path: Path) -> NDArray[np.uint8]:
    """Read what `write_once` wrote.

    Raises:
        StateError: If it is damaged.
    """
    try:
        whole = path.read_bytes()
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error})") from error
    data = whole[8:]
    if xxh3_64_intdigest(data).to_bytes(8, "little") != whole[:8]:
        raise damaged(path, "it does not match its checksum")
    return np.frombuffer(zlib.decompress(data), np.uint8)


def damaged(path: Path, why: str) -> StateError:
    """Make the error of a log that is not whole."""
    return StateError(
        f"{path}: the log of rows is damaged: {why}, expected what Tonari wrote; bring the "
        "directory back from a copy"
    )
