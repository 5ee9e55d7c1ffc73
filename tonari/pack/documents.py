"""Documents of text from JSON lines, Parquet and plain text, one after the other."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Literal, NoReturn, cast

import pyarrow as pa
import pyarrow.parquet as pq

from dataio.base.errors import SourceError
from dataio.source.expand import refuse_twins
from dataio.source.formats.stored_values import json_text, read_json

Split = Literal["file", "blank"]
"""A document of plain text: a whole file, or a block between blank lines."""

JSON_SUFFIXES, TEXT_SUFFIXES, PARQUET = (".jsonl", ".ndjson"), (".txt", ".text", ".md"), ".parquet"
CODECS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}
"""Arrow's name of the codec, by the suffix."""
READ_BYTES = 1 << 20
BATCH_ROWS = 256


@dataclass(frozen=True)
class Documents:
    """Files of documents, in order.

    Attributes:
        paths: The files.
        text: Key or column of a document's text, of JSON lines and Parquet.
        split: How plain text is divided.
    """

    paths: tuple[Path, ...]
    text: str
    split: Split

    def of(self, number: int) -> Iterator[tuple[int, str]]:
        """Read the documents of the file of that number, with little of it in memory.

        Each with where it begins: its line, from 1 on, or its row of Parquet, from 0 on.

        Only a file of plain text that is one document is read whole.

        Raises:
            SourceError: If the file is damaged, or a document has no text.
        """
        path = self.paths[number]
        kind = kind_of(path)
        if kind == PARQUET:
            return _of_parquet(path, self.text)
        if kind in JSON_SUFFIXES:
            return _of_json_lines(path, self.text)
        return _of_text(path, self.split)


def find_documents(src: str, *, text: str, split: Split) -> Documents:
    """Find the files that hold documents.

    Args:
        src: A file, a pattern, or a directory, which is searched with all those below it.
        text: Key or column of a document's text.
        split: How plain text is divided.

    Raises:
        SourceError: If there are none, or one of them is of no known kind.
    """
    path = Path(src).expanduser()
    if path.is_dir():
        found = [
            each
            for each in sorted(path.rglob("*"))
            if each.is_file() and kind_of(each) and not each.name.startswith((".", "_"))
        ]
    elif has_magic(src) and not path.exists():
        found = sorted(map(Path, glob(src, recursive=True)))  # noqa: PTH207 - may be absolute
    else:
        found = [path] if path.exists() else []
    suffixes = ", ".join((*JSON_SUFFIXES, PARQUET, *TEXT_SUFFIXES))
    known = f"{suffixes}, the lines and the text also with .gz or .zst"
    if not found:
        raise SourceError(f"{src}: found no documents, expected {known}; check the path")
    for each in found:
        if not kind_of(each):
            raise SourceError(
                f"{each}: its suffix says nothing of documents, expected one of {known}; rename "
                "the file or convert it"
            )
    refuse_twins([str(each) for each in found])
    return Documents(tuple(found), text, split)


def kind_of(path: Path) -> str:
    """Find the suffix that says what a file holds; "" where none does."""
    packed = path.suffix.lower() in CODECS
    suffix = (path.with_suffix("") if packed else path).suffix.lower()
    known = (*JSON_SUFFIXES, *TEXT_SUFFIXES, *(() if packed else (PARQUET,)))
    return suffix if suffix in known else ""


def _of_json_lines(path: Path, key: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(_lines(path), 1):
        if line.isspace():
            continue
        try:
            text = cast("dict[str, object]", read_json(json_text(memoryview(line))))[key]
            # Halves of a pair of surrogates are in no text.
            _ = text.encode() if isinstance(text, str) else b""
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            found = f"{line[:40]!r} ({type(error).__name__}: {error})"
            _refuse(path, f"line {number}", found, key)
        if not isinstance(text, str):
            _refuse(path, f"line {number}", f"a {type(text).__name__} there", key)
        yield number, text


def _of_parquet(path: Path, column: str) -> Iterator[tuple[int, str]]:
    with explained(path):
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        if column not in names:
            _refuse(path, "its columns", ", ".join(names), column)
        first = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=[column]):
            for number, text in enumerate(batch.column(0).to_pylist(), first):
                if not isinstance(text, str):
                    _refuse(path, f"row {number}", f"a {type(text).__name__} there", column)
                yield number, text
            first += batch.num_rows


def _of_text(path: Path, split: Split) -> Iterator[tuple[int, str]]:
    if split == "file":
        yield 1, _decoded(path, b"".join(_lines(path)), 1)
        return
    block: list[bytes] = []
    number = 0
    for number, line in enumerate(_lines(path), 1):
        if not line.isspace():
            block.append(line)
        elif block:
            yield number - len(block), _decoded(path, b"".join(block), number)
            block = []
    if block:
        yield number - len(block) + 1, _decoded(path, b"".join(block), number)


def _decoded(path: Path, text: bytes, line: int) -> str:
    try:
        if (zero := text.find(0)) >= 0:
            raise ValueError(f"a byte of zero, at {zero}")
        # Of several files that were joined each may begin with a byte order mark.
        return text.decode("utf-8-sig")
    except ValueError as error:
        raise SourceError(
            f"{path}: up to line {line}: found bytes that are no UTF-8 ({error}), expected text in "
            "UTF-8; convert the file, for example with iconv, or copy it again"
        ) from error


def _lines(path: Path) -> Iterator[bytes]:
    codec = CODECS.get(path.suffix.lower())
    with explained(path), path.open("rb", buffering=READ_BYTES) as opened:
        if codec is None:
            yield from opened
            return
        stream = pa.CompressedInputStream(pa.PythonFile(opened), codec)
        with io.BufferedReader(cast(io.RawIOBase, stream), READ_BYTES) as lines:
            yield from lines


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Name a file that cannot be read."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        kind = "Parquet file" if kind_of(path) == PARQUET else "file"
        raise SourceError(
            f"{path}: cannot be read ({error}), expected a whole {kind}; check it, or copy it again"
        ) from error


def _refuse(path: Path, where: str, found: str, key: str) -> NoReturn:
    raise SourceError(
        f"{path}: {where}: found {found}, expected text under {key!r}; name the key or column that "
        "holds a document's text (--text), or repair the file"
    )
