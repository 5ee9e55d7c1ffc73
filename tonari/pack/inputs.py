"""What can be packed: Parquet files and image folders, turned into samples."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.base.seeding import generator, key
from dataio.rows.fields import Bytes, Int
from dataio.source.formats.folder import ImageFolderSource, list_images
from dataio.source.names import read_field
from dataio.source.storage.files import Storage
from tonari.errors import CommandError
from tonari.pack.documents import PARQUET, explained, kind_of
from tonari.pack.shards import Sample

SAME_FORMAT = {"jpeg": "jpg", "tiff": "tif"}
KEY_COLUMNS = ("__key__", "key")
AT_ONCE, BATCH_ROWS = 64, 1024


@dataclass(frozen=True)
class Input:
    """Samples to pack.

    Attributes:
        num_samples: How many there are.
        samples: All of them, once.
        classes: Names of the classes by label, where the source has names.
    """

    num_samples: int
    samples: Iterator[Sample]
    classes: list[str] | None = None


def open_input(
    src: str, *, columns: Sequence[str] | None, shuffle_seed: int | None, scratch: Path
) -> Input:
    """Find out what ``src`` is and open it.

    Args:
        src: Parquet file, pattern or directory, or a folder with one folder of images per class.
        columns: Parquet columns to pack; all if left out.
        shuffle_seed: Orders the samples anew; left out, they keep their order.
        scratch: An existing directory with room for the selected columns, if they are shuffled.

    Raises:
        SourceError: If it is missing, empty, broken or of no known kind.
    """
    path = Path(src)
    if has_magic(src) and not path.exists():
        paths = sorted(map(Path, glob(src, recursive=True)))  # noqa: PTH207 - may be absolute
    elif path.is_dir():
        paths = sorted(path.glob("*.parquet"))
        if not paths:
            return _image_folder(path, shuffle_seed)
    else:
        paths = [path] if path.exists() else []
    if not paths:
        raise SourceError(f"{src}: found nothing there, expected a Parquet file; check the path")
    if text := next((each for each in paths if kind_of(each) not in ("", PARQUET)), None):
        raise SourceError(
            f"{text}: is text by its suffix, expected Parquet files or a folder of images; to pack "
            "text give --tokenizer: bytes, a tokenizer.json, or a directory that holds one"
        )
    return _parquet(paths, columns, shuffle_seed, scratch)


def _order(num_samples: int, seed: int | None) -> NDArray[np.int64]:
    if seed is None:
        return np.arange(num_samples)
    return generator(key(seed, "pack")).permutation(num_samples)


def _image_folder(root: Path, seed: int | None) -> Input:
    storage = Storage()
    source = ImageFolderSource(str(root), list_images(str(root), storage), storage=storage)
    names = [
        Path(source.place_of(number)).relative_to(root) for number in range(source.num_samples)
    ]
    if not names:
        raise SourceError(
            f"{root}: found no images, expected Parquet files, or a folder of them for each class"
        )
    formats = {name.suffix.lower()[1:] for name in names}
    kinds = sorted({SAME_FORMAT.get(kind, kind) for kind in formats})
    if len(kinds) > 1:
        raise SourceError(
            f"{root}: found {' and '.join(kinds)} images, expected one format, as all samples have "
            "the same fields; convert some of them, or pack each format on its own"
        )

    def samples() -> Iterator[Sample]:
        for ids in np.array_split(_order(len(names), seed), -(-len(names) // AT_ONCE)):
            images = read_field(source, ids, Bytes("image"))
            labels = read_field(source, ids, Int("label"))
            for number, image, label in zip(ids.tolist(), images, labels, strict=True):
                name = names[number].with_suffix("").as_posix()
                yield {"__key__": _key(name), kinds[0]: image, "cls": b"%d" % label}

    return Input(len(names), samples(), source.classes)


def _key(text: str) -> str:
    """Turn a name into a key: readers end it at the first dot, an index at white space."""
    folder, slash, name = text.rpartition("/")
    return re.sub(r"\s", "_", folder) + slash + re.sub(r"[\s.]", "_", name)


def _parquet(
    paths: Sequence[Path], columns: Sequence[str] | None, seed: int | None, scratch: Path
) -> Input:
    files = []
    for path in paths:
        with explained(path):
            files.append(pq.ParquetFile(path, memory_map=False))
    schema = files[0].schema_arrow
    key_column = next((name for name in KEY_COLUMNS if name in schema.names), None)
    chosen = [name for name in columns or schema.names if name != key_column]
    for path, file in zip(paths, files, strict=True):
        _check_columns(path, file.schema_arrow, chosen, key_column)
        if file.schema_arrow.names != schema.names:
            raise SourceError(
                f"{path}: has the columns {file.schema_arrow.names}, expected {schema.names} as in "
                f"{paths[0]}; pack files of one dataset together, others on their own"
            )
    num_samples = sum(file.metadata.num_rows for file in files)
    wanted = [*chosen, *([key_column] if key_column else [])]

    def batches() -> Iterator[pa.RecordBatch]:
        for path, file in zip(paths, files, strict=True):
            with explained(path):
                yield from file.iter_batches(BATCH_ROWS, columns=wanted)

    shuffled = _in_order(batches(), num_samples, seed, scratch) if seed is not None else None
    return Input(num_samples, _rows(shuffled or _numbered(batches()), chosen, key_column))


def _check_columns(path: Path, schema: pa.Schema, chosen: Sequence[str], key: str | None) -> None:
    absent = [name for name in chosen if name not in schema.names]
    if absent or not chosen:
        raise SourceError(
            f"{path}: has the columns {schema.names}, expected {absent or 'one beside the key'}; "
            "name columns that are there (--columns)"
        )
    if len({name.lower() for name in chosen}) < len(chosen):
        raise SourceError(
            f"{path}: columns {list(chosen)} differ only in case, expected different extensions; "
            "choose some of them (--columns)"
        )
    for name in [*chosen, *([key] if key else [])]:
        if not _is_supported(schema.field(name).type) or "/" in name or " " in name:
            raise SourceError(
                f"{path}: column {name!r} holds {schema.field(name).type}, expected bytes, text, "
                "whole or floating-point numbers under a name without spaces and slashes; choose "
                "other columns (--columns)"
            )


def _is_supported(kind: pa.DataType) -> bool:
    types = pa.types
    text = types.is_string(kind) or types.is_large_string(kind)
    binary = types.is_binary(kind) or types.is_large_binary(kind)
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return bool(text or binary or number or types.is_fixed_size_binary(kind))


Numbered = Iterator[tuple[int, pa.RecordBatch]]
"""Row numbers in the source, each of the first row of the batch that follows."""


def _numbered(batches: Iterator[pa.RecordBatch]) -> Numbered:
    first = 0
    for batch in batches:
        yield first, batch
        first += batch.num_rows


def _in_order(
    batches: Iterator[pa.RecordBatch], num_samples: int, seed: int, scratch: Path
) -> Numbered:
    """Yield single rows in a keyed order: out of a mapped copy, so that memory stays small."""
    copy = scratch / "rows.arrow"
    starts = [0]
    try:
        with pa.OSFile(str(copy), "wb") as file, contextlib.ExitStack() as opened:
            for number, batch in enumerate(batches):
                if number == 0:
                    writer = opened.enter_context(pa.ipc.new_file(file, batch.schema))
                writer.write_batch(batch)
                starts.append(starts[-1] + batch.num_rows)
    except OSError as error:
        raise CommandError(
            f"{scratch}: cannot hold the rows to be shuffled: {error}; set TMPDIR to a directory "
            "with more room, or do without --shuffle-seed"
        ) from error
    if not num_samples:
        return  # An empty file cannot be mapped.
    with pa.memory_map(str(copy)) as mapped:
        reader = pa.ipc.open_file(mapped)
        for row in _order(num_samples, seed).tolist():
            number = int(np.searchsorted(starts, row, side="right")) - 1
            yield row, reader.get_batch(number).slice(row - starts[number], 1)


def _rows(batches: Numbered, chosen: Sequence[str], key_column: str | None) -> Iterator[Sample]:
    for first, batch in batches:
        columns = {name.lower(): _cells(batch, name, first) for name in chosen}
        keys = [b"%09d" % (first + row) for row in range(batch.num_rows)]
        if key_column:
            keys = _cells(batch, key_column, first)
        for row, name in enumerate(keys):
            cells = {extension: cells[row] for extension, cells in columns.items()}
            yield {"__key__": _key(name.decode(errors="replace")), **cells}


def _cells(batch: pa.RecordBatch, name: str, first: int) -> list[bytes]:
    cells = batch.column(name).to_pylist()
    if None in cells:
        raise SourceError(
            f"row {first + cells.index(None)}: column {name!r} is empty, expected a value in every "
            "row; fill it, or choose other columns (--columns)"
        )
    return [_encode(cell) for cell in cells]


def _encode(cell: bytes | str | bool | int | float) -> bytes:
    if isinstance(cell, bytes):
        return cell
    return (str(int(cell)) if isinstance(cell, bool) else str(cell)).encode()
