"""Write a cache's rows as Parquet or Arrow files, for other tools to read."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataio.base.errors import CacheError
from dataio.rows.rows import FixedColumn, Rows, corrupt_rows, row_offsets
from dataio.store.cache import Cache
from dataio.store.lock import held
from dataio.store.tools.report import open_to_read

Format = Literal["parquet", "arrow"]
BLOCK_BYTES = 64 << 20


class _TableWriter(Protocol):
    def write_table(self, table: pa.Table) -> None: ...

    def close(self) -> None: ...


def export_cache(
    directory: Path, target: Path, *, file_format: Format, rows_per_file: int | None = None
) -> Iterator[tuple[int, Path]]:
    """Write all rows of a node's cache, in the order of their slots.

    A column ``sample_id``; a fixed field is a column of numbers, or of fixed-size lists with its
    shape in the column's metadata; a variable field its bytes as they are kept.

    Args:
        directory: A node directory.
        target: An existing directory; files are named after dataset and node.
        file_format: ``"parquet"`` or ``"arrow"`` (IPC).
        rows_per_file: Rows of each but the last; by default all go into one file.

    Yields:
        Rows written so far, and the file they went to; it has its name only when it is whole.

    Raises:
        CacheBusyError: If a job exchanges rows there, or stages it.
        CacheError: If a file is there already, or cannot be written; or the cache is damaged.
    """
    with held(directory, "exporting", alone=False) as lock:
        cache = open_to_read(directory)
        slots = np.flatnonzero(cache.entries.present)
        size = rows_per_file or max(len(slots), 1)
        parts = range(0, max(len(slots), 1), size)
        stem, suffix = f"{directory.parent.name}-{directory.name}", f".{file_format}"
        names = [f"-{number:05d}" if rows_per_file else "" for number in range(len(parts))]
        paths = [target / f"{stem}{name}{suffix}" for name in names]
        _refuse_existing(paths)
        for first, path in zip(parts, paths, strict=True):
            for done in _write(cache, slots[first : first + size], path, file_format):
                lock.touch()
                yield first + done, path


def _refuse_existing(paths: list[Path]) -> None:
    for path in paths:
        if path.exists():
            raise CacheError(
                f"{path}: is there already, expected to make it; remove it or give another "
                "directory"
            )


def _write(
    cache: Cache, slots: NDArray[np.int64], path: Path, file_format: Format
) -> Iterator[int]:
    partial = path.with_name(path.name + ".partial")
    schema = _schema(cache)
    with contextlib.ExitStack() as undo:
        undo.callback(partial.unlink, missing_ok=True)
        try:
            with contextlib.closing(_writer(partial, schema, file_format)) as writer:
                step = _block_rows(cache)
                for first in range(0, len(slots), step):
                    rows = cache.read_rows(slots[first : first + step])
                    for row in corrupt_rows(rows)[:1].tolist():
                        raise CacheError(
                            f"{cache.directory}: the row of sample {rows.sample_id[row]} does not "
                            "match its checksum; run `tonari cache verify`, which takes it out"
                        )
                    writer.write_table(_table(rows, schema))
                    yield first + len(rows)
            _refuse_existing([path])
            os.replace(partial, path)
        except OSError as error:
            raise CacheError(
                f"{path}: could not be written ({error}); free some space or give another directory"
            ) from error


def _writer(path: Path, schema: pa.Schema, file_format: Format) -> _TableWriter:
    writer: Any
    if file_format == "parquet":
        writer = pq.ParquetWriter(path, schema)
    else:
        writer = pa.ipc.new_file(str(path), schema)
    checked: _TableWriter = writer
    return checked


def _block_rows(cache: Cache) -> int:
    lengths = cache.entries.extent_bytes
    mean = cache.schema.fixed_bytes + (float(lengths.mean()) if len(lengths) else 0.0)
    return max(int(BLOCK_BYTES / max(mean, 1.0)), 1)


def _schema(cache: Cache) -> pa.Schema:
    columns = [pa.field("sample_id", pa.int64())]
    for fixed in cache.schema.fixed:
        shape = {"shape": ",".join(map(str, fixed.shape))} if fixed.shape else None
        columns.append(pa.field(fixed.name, _type(fixed), metadata=shape))
    columns += [pa.field(name, pa.large_binary()) for name in cache.schema.variable]
    return pa.schema(columns)


def _type(column: FixedColumn) -> pa.DataType:
    try:
        kind = pa.from_numpy_dtype(_native(column))
    except (NotImplementedError, pa.ArrowNotImplementedError) as error:
        raise CacheError(
            f"field {column.name!r} is of dtype {column.dtype}, expected a kind of number that "
            "Arrow has; read it from the cache's own fixed-*.npy instead"
        ) from error
    return pa.list_(kind, _width(column)) if column.shape else kind


def _native(column: FixedColumn) -> np.dtype[Any]:
    return np.dtype(column.dtype).newbyteorder("=")


def _width(column: FixedColumn) -> int:
    return int(np.prod(column.shape, dtype=np.int64))


def _table(rows: Rows, schema: pa.Schema) -> pa.Table:
    columns = [pa.array(rows.sample_id)]
    for fixed, data in zip(rows.schema.fixed, rows.fixed, strict=True):
        # dtype[num_rows * width]
        values = np.ascontiguousarray(data).reshape(-1).view(fixed.dtype).astype(_native(fixed))
        flat = pa.array(values)
        columns.append(
            pa.FixedSizeListArray.from_arrays(flat, _width(fixed)) if fixed.shape else flat
        )
    for number, data in enumerate(rows.variable):
        offsets = pa.py_buffer(row_offsets(rows.lengths[:, number]))
        buffers = [None, offsets, pa.py_buffer(data)]
        columns.append(pa.Array.from_buffers(pa.large_binary(), len(rows), buffers))
    return pa.Table.from_arrays(columns, schema=schema)
