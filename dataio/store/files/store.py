"""The files that hold a pool's bytes: one `.npy` a fixed field, one heap of extents a local rank.

Files are only ever preallocated, grown or unlinked, never cut under a reader; so a mapping never
faults, and a full disk is an error at the moment of growing, before any row is written.
"""

import contextlib
import io
import mmap
import os
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataio.base.atomic import as_open_as_its_directory, begin_writeback, parse_table
from dataio.base.errors import CacheError, DamagedFileError, QuotaError
from dataio.rows.rows import FixedColumn

HEAP_STEP_BYTES = 64 << 20
MAPPED_BYTES = 16 << 10
"""Up to here a few page faults cost less than opening the file and waiting for the interpreter."""
RUN_ROWS = 8
"""Rows in a run, on average, from which on a write a run is cheaper than page faults."""


ALIGN_BYTES = 4096
"""Where rows of a memory page or more begin. A page of most machines; those of larger ones are
past what NumPy reads of a header, 10,000 bytes."""
HEADER_BYTES = 128
"""Where narrower rows begin: what NumPy's own header takes, for all but long shapes."""
FOLIO_BYTES = 2 << 20
"""What the page cache holds in one piece at best; a fault then maps as much at once."""
LARGE_BYTES = 2 * FOLIO_BYTES
"""A write of so much makes large pieces by itself, where it finds room for them: to ask for them
has the kernel look for room by moving other memory, which may take longer than the write."""


class _LargePages:
    """Has the page cache hold a file in large pieces, from the first write on.

    It chooses their size when it first sees a page: by the length of a write, or, where it is asked
    to, by a read fault. Rows in small pieces cost up to ten times as much to overwrite one by one,
    and more to write and to gather (``docs/adr/0011``). Kernels that have only small pieces lose
    nothing by it.

    Args:
        path: A file whose space is claimed before it is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)

    def prepare(self, descriptor: int, start: int, stop: int) -> None:
        """Be called before the bytes [start, stop) are written in one run; cheap if they were."""
        is_short = MAPPED_BYTES < stop - start < LARGE_BYTES
        if not is_short or not hasattr(mmap, "MADV_HUGEPAGE"):
            return
        # Not what was written before: it might have to come from the disk.
        hole = os.lseek(descriptor, start, os.SEEK_HOLE)
        if hole >= stop:
            return
        held = self._bytes  # a thread that flushes may forget it meanwhile
        if len(held) < stop:
            mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
            held = self._bytes = np.frombuffer(mapped, np.uint8)
        held[hole // FOLIO_BYTES * FOLIO_BYTES : stop : FOLIO_BYTES].max()

    def forget(self) -> None:
        """Unmap the file: this mapping must not serve gathers, which want a row at a time."""
        self._bytes = self._bytes[:0].copy()


class FixedFile:
    """A fixed field of every position, as a NumPy array on disk that anyone may `np.load`.

    Args:
        path: The `.npy` file.
        column: dtype and shape of one row.
    """

    def __init__(self, path: Path, column: FixedColumn) -> None:
        self.path = path
        self.column = column
        self.rows: NDArray[np.uint8] = np.empty((0, column.width_bytes), np.uint8)
        self._large_pages = _LargePages(path)
        self._alone = False

    @cached_property
    def start_bytes(self) -> int:
        """Where the rows begin: those of a page or more on a page, or each would need one more."""
        unit = ALIGN_BYTES if self.column.width_bytes >= ALIGN_BYTES else HEADER_BYTES
        return -(-len(self._plain_header(0)) // unit) * unit

    def _plain_header(self, num_positions: int) -> bytes:
        header = io.BytesIO()
        described = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(self.column.dtype)),
            "fortran_order": False,
            "shape": (num_positions, *self.column.shape),
        }
        np.lib.format.write_array_header_1_0(header, described)
        return header.getvalue()

    def reserve(self, num_positions: int) -> None:
        """Make the file hold at least ``num_positions``; disk space is claimed now."""
        if self.path.exists() and self.count_positions() >= num_positions:
            return
        end = self.start_bytes + num_positions * self.column.width_bytes
        descriptor = as_open_as_its_directory(str(self.path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            # Space first: on a full disk the header must not promise rows that are not there.
            os.posix_fallocate(descriptor, 0, end)
            self._write_header(descriptor, num_positions)
        finally:
            os.close(descriptor)

    def has_its_header(self) -> bool:
        """Whether the header, if there is a file, is what the file's size says."""
        if not self.path.exists():
            return True
        descriptor = open_at_random(self.path)
        try:
            found = os.pread(descriptor, self.start_bytes, 0)
        finally:
            os.close(descriptor)
        return found == self._header(self.count_positions())

    def repair_header(self) -> None:
        """Write the header anew if it is not what the file's size says, as after a kill.

        Only others read it, as NumPy does: nothing here goes by it.
        """
        if self.has_its_header():
            return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._write_header(descriptor, self.count_positions())
        finally:
            os.close(descriptor)

    def _header(self, num_positions: int) -> bytes:
        # Format 1.0 of `.npy`, filled up with spaces before its last newline.
        plain = self._plain_header(num_positions)
        described = plain[10:-1].ljust(self.start_bytes - 11) + b"\n"
        return plain[:8] + len(described).to_bytes(2, "little") + described

    def _write_header(self, descriptor: int, num_positions: int) -> None:
        _write_all(descriptor, memoryview(self._header(num_positions)), 0)
        os.fsync(descriptor)

    def close(self) -> None:
        """Let go of the mapping; views of it stay valid."""
        self.rows = np.empty((0, self.column.width_bytes), np.uint8)

    def count_positions(self) -> int:
        """Count the rows that the file has room for, by its size; 0 where there is none yet."""
        if not self.path.exists():
            return 0
        space = self.path.stat().st_size - self.start_bytes
        return max(space, 0) // max(self.column.width_bytes, 1)

    def map(self, *, writable: bool = True) -> None:
        """Map the file: ``rows`` is uint8[num_positions, width_bytes], shared by all ranks.

        Raises:
            OSError: If it is not there.
        """
        shape = (self.count_positions(), self.column.width_bytes)
        if not shape[0]:
            self.path.stat()
            self.rows = np.empty(shape, np.uint8)
            return
        mode: Literal["r", "r+"] = "r+" if writable else "r"
        mapped = np.memmap(self.path, np.uint8, mode, offset=self.start_bytes, shape=shape)
        self.rows = mapped.view(np.ndarray)
        if self._alone:
            _read_alone(self.rows)

    def expect_no_neighbours(self) -> None:
        """Have a page that is touched read without those around it: the next rows lie elsewhere."""
        self._alone = True
        _read_alone(self.rows)

    def write(self, positions: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Write rows; neighbours on disk go in one write, which beats faulting in their pages."""
        check_length(self.path, self.start_bytes + self.rows.nbytes)
        width = self.column.width_bytes
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        scattered = len(breaks) and (len(breaks) + 1) * RUN_ROWS > len(positions)
        if (scattered or rows.nbytes <= MAPPED_BYTES) and self.rows.flags.writeable:
            self.rows[positions] = rows
            return
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            for run in np.split(np.arange(len(positions)), breaks):
                if len(run):
                    data = np.ascontiguousarray(rows[run[0] : run[-1] + 1]).reshape(-1)
                    offset = self.start_bytes + width * int(positions[run[0]])
                    self._large_pages.prepare(descriptor, offset, offset + len(data))
                    _write_all(descriptor, data.data, offset)
                    begin_writeback(descriptor, offset, len(data))
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Make every row written so far durable. Blocks on the disk."""
        self._large_pages.forget()
        _sync(self.path)


class HeapFile:
    """Extents of variable size; its local rank writes, all ranks of the node read.

    Args:
        path: The file; it need not exist before `write`.
        limit_bytes: What it may never exceed.
    """

    def __init__(self, path: Path, *, limit_bytes: int | None = None) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        self._mapped: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._alone = False
        self._large_pages = _LargePages(path)
        self._capacity = path.stat().st_size if path.exists() else 0

    def close(self) -> None:
        """Let go of the mapping; views of it stay valid."""
        self._mapped = np.empty(0, np.uint8)

    def view(self, end: int) -> NDArray[np.uint8]:
        """Map the file up to ``end`` at least. Earlier views stay valid.

        Raises:
            CacheError: If it ends before.
        """
        if end > len(self._mapped):
            check_length(self.path, end)
            self._mapped = np.memmap(self.path, np.uint8, "r").view(np.ndarray)
            if self._alone:
                _read_alone(self._mapped)
        return self._mapped

    def expect_no_neighbours(self) -> None:
        """Have a page that is touched read without those around it: the next rows lie elsewhere."""
        self._alone = True
        _read_alone(self._mapped)

    def write(
        self, offsets: NDArray[np.int64], lengths: NDArray[np.int64], data: NDArray[np.uint8]
    ) -> None:
        """Write extents, given back to back in ``data``; neighbours on disk go in one write."""
        if not len(data):
            return
        self.reserve(int((offsets + lengths).max()))
        starts = np.cumsum(lengths) - lengths
        breaks = np.flatnonzero(offsets[1:] != offsets[:-1] + lengths[:-1]) + 1
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            firsts = np.concatenate([[0], breaks]).tolist()
            lasts = np.concatenate([breaks, [len(offsets)]]).tolist()
            for first, last in zip(firsts, lasts, strict=True):
                run = data[int(starts[first]) : int(starts[last - 1] + lengths[last - 1])]
                offset = int(offsets[first])
                self._large_pages.prepare(descriptor, offset, offset + len(run))
                _write_all(descriptor, run.data, offset)
                begin_writeback(descriptor, offset, len(run))
        finally:
            os.close(descriptor)

    def reserve(self, end: int) -> None:
        """Make the file at least ``end`` long; disk space is claimed now."""
        if end <= self._capacity:
            return
        capacity = end + min(HEAP_STEP_BYTES, max(1 << 16, end // 8))
        if self._limit_bytes is not None:
            if end > self._limit_bytes:
                raise QuotaError(
                    f"{self.path}: would grow to {end} bytes, expected at most "
                    f"{self._limit_bytes} by the quota; raise the quota"
                )
            capacity = min(capacity, self._limit_bytes)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # From where it ends: a tmpfs visits every page of what is asked for, claimed or not.
            os.posix_fallocate(descriptor, self._capacity, capacity - self._capacity)
        finally:
            os.close(descriptor)
        self._capacity = capacity

    def trim(self, end: int) -> None:
        """Give back the space past ``end``. Only while nobody else has the file mapped."""
        if self._capacity > end:
            os.truncate(self.path, end)
            self._capacity = end

    def sync(self) -> None:
        """Make every extent written so far durable. Blocks on the disk."""
        self._large_pages.forget()
        if self.path.exists():
            _sync(self.path)


def map_table(
    path: Path, *, verify: bool = True
) -> tuple[dict[str, NDArray[np.generic]], dict[bytes, bytes]]:
    """Map the columns of a table's file, shared by all who do.

    Args:
        path: What `write_table` wrote.
        verify: Whether to read it whole, to compare it with its checksum; else nothing is read yet.

    Returns:
        Each column by name, and the schema's metadata. Writing into one changes private copies of
        the pages that are touched, never the file.

    Raises:
        DamagedFileError: If it does not match its checksum, or is no table.
    """
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise DamagedFileError(f"{path}: is empty, expected what Tonari wrote")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    table = parse_table(path, mapped, verify=verify)
    start_address = pa.py_buffer(mapped).address
    columns: dict[str, NDArray[np.generic]] = {}
    for name in table.column_names:
        # `to_pandas_dtype` of older Arrow, such as 17, imports pandas.
        dtype = pa.array([], table.schema.field(name).type).to_numpy(zero_copy_only=False).dtype
        start = 0
        for array in table.column(name).chunks:  # one, or none where there is no row
            # By way of the address: what Arrow hands out itself cannot be written.
            start = array.buffers()[1].address - start_address
        columns[name] = np.frombuffer(mapped, dtype, count=table.num_rows, offset=start)
    return columns, table.schema.metadata or {}


def _read_alone(mapped: NDArray[np.uint8]) -> None:
    base: object = mapped
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_RANDOM)


def open_at_random(path: Path) -> int:
    """Open a file of which rows are read here and there: the kernel reads nothing beside them.

    A page that it had read ahead would even have it read on whenever somebody comes to that page.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def check_length(path: Path, least_bytes: int) -> None:
    """Refuse a file that something else than the cache has cut or removed."""
    found = path.stat().st_size if path.exists() else 0
    if found < least_bytes:
        was = "is not there any more" if not path.exists() else f"is {found} bytes long"
        raise CacheError(
            f"{path}: {was}, expected at least {least_bytes} bytes by the cache's own manifest; "
            f"something else cut or removed it: find out what cleans {path.parent.parent}, remove "
            f"{path.parent}, and start the job again, which stages these rows again"
        )


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
