"""What stands beside the shards of a packed text: which tokenizer made it, and what it holds."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError

INFO, SOURCES = "text.json", "sources.json"
LINES = ".lines"
"""Beside a ``.bin``: int64[num_documents, 2], of each document the number in `SOURCES` of the file
that it was in, and its line there, from 1 on, or its row of Parquet, from 0 on."""
FORMAT = "tonari-text-1"


@dataclass(frozen=True, kw_only=True)
class TextInfo:
    """The contents of ``text.json``, which is written last: with it the dataset is whole.

    Attributes:
        tokenizer: How the tokenizer was named.
        digest: Of the tokenizer; see `Tokenizer.digest`.
        vocabulary: Every token is in [0, vocabulary).
        end: The token behind each document; None: there is none.
        dtype: Of the tokens in the ``.bin`` files.
        documents: Documents of all shards.
        tokens: Tokens of all shards, the ``end`` tokens among them.
        shards: Names of the ``.bin`` files, in order.
        format: Says what this file is.
    """

    tokenizer: str
    digest: str
    vocabulary: int
    end: int | None
    dtype: str
    documents: int
    tokens: int
    shards: tuple[str, ...]
    format: str = FORMAT

    def to_json(self) -> bytes:
        """Write the contents as JSON."""
        return json.dumps(asdict(self), indent=1).encode()


def token_dtype(vocabulary: int) -> np.dtype[np.generic]:
    """Choose the smallest dtype of Megatron's that holds every token."""
    for name in ("uint8", "uint16"):
        if vocabulary <= 1 + np.iinfo(name).max:
            return np.dtype(name)
    return np.dtype("int32")


def read_info(directory: str | Path) -> TextInfo:
    """Read what a directory that `tonari pack` wrote holds.

    Raises:
        SourceError: If it is none, or not whole.
    """
    path = Path(directory) / INFO
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r}")
        return TextInfo(**{**found, "shards": tuple(found["shards"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"{path}: found no whole packed text ({error}), expected a directory that tonari pack "
            "wrote; run `tonari pack SRC DST --tokenizer TOKENIZER`, and name DST"
        ) from error


def read_infos(directories: Sequence[str]) -> TextInfo:
    """Read what several packed datasets hold together.

    Returns:
        The contents of all, with the paths of the shards.

    Raises:
        SourceError: If one is none, or was made by another tokenizer than the first.
    """
    found = [read_info(directory) for directory in directories]
    first = found[0]
    for directory, info in zip(directories, found, strict=True):
        if (info.digest, info.dtype) != (first.digest, first.dtype):
            raise SourceError(
                f"{Path(directory) / INFO}: was packed with the tokenizer {info.tokenizer} "
                f"({info.digest}, {info.vocabulary} tokens), expected {first.tokenizer} "
                f"({first.digest}, {first.vocabulary} tokens) as {directories[0]} was; pack one of "
                "them again"
            )
    shards = [
        str(Path(directory) / name)
        for directory, info in zip(directories, found, strict=True)
        for name in info.shards
    ]
    return TextInfo(
        tokenizer=first.tokenizer, digest=first.digest, vocabulary=first.vocabulary,
        end=first.end, dtype=first.dtype, documents=sum(info.documents for info in found),
        tokens=sum(info.tokens for info in found), shards=tuple(shards),
    )  # fmt: skip


def document_places(shard: str, documents: NDArray[np.int64]) -> list[str]:
    """Name the file and line of documents, by their numbers in a shard; "" where nobody kept them.

    Raises:
        SourceError: If what was kept is damaged.
    """
    path = Path(shard).with_suffix(LINES)
    if not path.exists():
        return [""] * len(documents)
    try:
        names = json.loads((path.parent / SOURCES).read_bytes())
        rows = np.memmap(path, "<i8", mode="r").reshape(-1, 2)[documents].tolist()
        return [
            f"{names[file]} {'row' if names[file].endswith('.parquet') else 'line'} {line}"
            for file, line in rows
        ]
    except (OSError, ValueError, IndexError, TypeError) as error:
        raise SourceError(
            f"{path}: cannot be read ({error}), expected the lines of its documents, as tonari "
            f"pack wrote them; copy it and {SOURCES} again, or remove it"
        ) from error
