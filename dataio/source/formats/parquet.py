"""Rows from Parquet shards, one row group at a time, column by column."""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Field
from dataio.rows.rows import Rows
from dataio.source.base import SampleCounts, Shard, ShardFormat
from dataio.source.formats.columns import check_columns, check_units, one_line, table_rows
from dataio.source.formats.hugging_face import class_names
from dataio.source.storage.file_object import FileObject
from dataio.source.storage.files import Storage, StorageFile

MAGIC, TAIL_BYTES = b"PAR1", 8
ANOTHER = re.compile(rb"(?:PAR1|\0{4})PAR1|PAR1\Z")
INDEX_BYTES = 8 << 20
"""Of a file's indexes, no more are searched for the end of another file before it."""
FOOTER_GROWTH = 10
"""A footer in memory to its bytes in the file: 9 were measured."""


class ParquetFormat(ShardFormat):
    """Parquet shards: a sample is a row, a field's key a column.

    A shard is opened again for each row group that is staged; its footer is read once.
    """

    def count(self, storage: Storage, path: str) -> SampleCounts:
        """Count the rows of each row group: readers that meet between two share none."""
        with storage.open(path) as file:
            metadata = _open(file, storage).metadata
            _check_ends(file, metadata)
        return SampleCounts(_group_rows(metadata))

    def class_names(self, storage: Storage, path: str, key: str) -> list[str] | None:
        """Name the classes of a column, where Hugging Face wrote them."""
        with storage.open(path) as file:
            return class_names(_open(file, storage).schema_arrow.metadata, key)

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples of a shard; row groups that hold none of them are left out."""
        with storage.open(shard.path) as file:
            parquet = _open(file, storage)
            _check(parquet, shard, fields)
            columns = sorted({field.key for field in fields.values()})
            check_units(
                shard.path, parquet.schema_arrow, columns, shard.like,
                lambda: _read_schema(storage, shard.like),
            )  # fmt: skip
            stop = 0
            for group, num_rows in enumerate(_group_rows(parquet.metadata)):
                start, stop = stop, stop + num_rows
                first, last = np.searchsorted(numbers, [start, stop])
                if first == last:
                    continue
                table = _read_group(parquet, group, columns, shard.path)
                if table.num_rows != num_rows:
                    raise SourceError(
                        f"{shard.path}: row group {group} holds {table.num_rows} rows, expected "
                        f"{num_rows} by the footer; the shard is damaged: copy or write it again"
                    )
                chosen = numbers[first:last] - start
                at = shard.first + start
                if days := _int96_columns(parquet, table.schema):
                    seconds = _read_group(
                        _open(file, storage, int96_unit="s"), group, days, shard.path
                    )
                    _check_int96(table.select(days), seconds, first=at, path=shard.path)
                yield from table_rows(table, chosen, fields, first=at, path=shard.path)


def _read_schema(storage: Storage, path: str) -> pa.Schema:
    with storage.open(path) as file:
        return _open(file, storage).schema_arrow


def _open(file: StorageFile, storage: Storage, *, int96_unit: str = "ns") -> pq.ParquetFile:
    arrow_file = pa.PythonFile(FileObject(file), mode="r")
    try:
        footer = storage.metadata.get(
            file, lambda: pq.read_metadata(arrow_file), size_of=_footer_bytes
        )
        return pq.ParquetFile(
            arrow_file,
            metadata=footer,
            pre_buffer=False,
            page_checksum_verification=True,
            coerce_int96_timestamp_unit=int96_unit,
        )
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(
            f"{file.path}: found {file.size} bytes that do not read as Parquet "
            f"({one_line(error)}), expected a whole Parquet file; copy or write the shard again"
        ) from error


def _footer_bytes(footer: pq.FileMetaData) -> int:
    return int(footer.serialized_size) * FOOTER_GROWTH


def _group_rows(metadata: pq.FileMetaData) -> list[int]:
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _check_ends(file: StorageFile, metadata: pq.FileMetaData) -> None:
    """Refuse a file that others were joined to: the last footer counts, from the first one's bytes.

    Raises:
        SourceError: If it does not begin as Parquet, or another file begins in it.
    """
    rows = _group_rows(metadata)
    if sum(rows) != metadata.num_rows or min(rows, default=0) < 0:
        found = f"a footer of {metadata.num_rows} rows, of whose row groups have {sum(rows)}"
        raise _refused(file, file.size - metadata.serialized_size, found)
    if not rows or not metadata.num_columns:
        return
    start, _ = _extent(metadata.row_group(0))
    _, stop = _extent(metadata.row_group(len(rows) - 1))
    # Indexes of pages and Bloom filters may lie before the footer.
    num_behind = file.size - TAIL_BYTES - metadata.serialized_size - stop
    if start == len(MAGIC) and num_behind == 0:
        return
    if num_behind < 0 or file.read_at(0, len(MAGIC)) != MAGIC:
        raise _refused(file, 0, "bytes that belong to no row group")
    # So far behind its begin would a whole file end that has another before it.
    near = max(num_behind - INDEX_BYTES, 0)
    before = file.read_at(near, num_behind + len(MAGIC) - near)
    if joined := ANOTHER.search(before):
        begin = near + joined.end() - len(MAGIC)
        raise _refused(file, begin, "the begin of another Parquet file")


def _extent(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """Find where the columns of a row group begin and end in the file."""
    columns = [group.column(number) for number in range(group.num_columns)]
    # Some writers name a dictionary that is not there, behind the data or at 0.
    starts = [
        min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset)
        for column in columns
    ]
    sizes = [column.total_compressed_size for column in columns]
    return min(starts), max(start + size for start, size in zip(starts, sizes, strict=True))


def _refused(file: StorageFile, at: int, found: str) -> SourceError:
    return SourceError(
        f"{file.path}: found {found} at byte {at} of {file.size}, expected one whole Parquet file; "
        "give files that were joined as several shards, or copy or write it again"
    )


def _check(parquet: pq.ParquetFile, shard: Shard, fields: Mapping[str, Field]) -> None:
    if parquet.metadata.num_rows != shard.num_samples:
        raise SourceError(
            f"{shard.path}: found {parquet.metadata.num_rows} rows, expected {shard.num_samples} "
            "as when it was opened; something is writing to it: start again when it is whole"
        )
    check_columns(shard.path, parquet.schema_arrow.names, fields)


def _read_group(parquet: pq.ParquetFile, group: int, columns: Sequence[str], path: str) -> pa.Table:
    try:
        return parquet.read_row_group(group, columns=columns, use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(
            f"{path}: row group {group} does not read ({one_line(error)}), expected "
            f"{', '.join(columns)} of its rows; the shard is damaged: copy or write it again"
        ) from error


def _int96_columns(parquet: pq.ParquetFile, schema: pa.Schema) -> list[str]:
    """List the columns of times that are kept as a day and a time of it, as Spark wrote them."""
    times = [field.name for field in schema if "timestamp" in str(field.type)]
    if not times:
        return []
    leaves = map(parquet.schema.column, range(len(parquet.schema)))
    kept = {leaf.path.split(".")[0] for leaf in leaves if leaf.physical_type == "INT96"}
    return [name for name in times if name in kept]


def _check_int96(found: pa.Table, seconds: pa.Table, *, first: int, path: str) -> None:
    """Refuse times that nanoseconds of 64 bits do not reach: Arrow lets them wrap around.

    Older pyarrow wrote times before 1970 with a negative time of day, which the format cannot
    hold: in the file they are the same as times 584 years later.

    Args:
        found: The columns as they are read, in nanoseconds.
        seconds: The same in seconds, which reach all of them.
        first: Number of the first row as a sample.
        path: Of the shard, for the message.

    Raises:
        FieldError: If there is one.
    """
    for key in found.column_names:
        wrong = np.flatnonzero(_whole(found.column(key)) // 10**9 != _whole(seconds.column(key)))
        if len(wrong):
            is_flat = pa.types.is_timestamp(found.column(key).type)
            sample = f"sample {first + wrong[0]}" if is_flat else f"samples from {first} on"
            raise FieldError(
                f"{path}: column {key!r}, {sample}: found a time of INT96 before 1678 or after "
                "2261, or one before 1970 as older pyarrow wrote it, which looks the same; "
                "expected one that 64 bits of nanoseconds reach; write the column again as "
                "timestamp[us] (in Spark outputTimestampType=TIMESTAMP_MICROS)"
            )


def _whole(column: pa.ChunkedArray) -> NDArray[np.int64]:
    values = column.combine_chunks()
    while pa.types.is_list(values.type):
        values = values.flatten()
    return np.asarray(values.cast(pa.int64()).fill_null(0).to_numpy(False))
