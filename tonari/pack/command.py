"""`tonari pack`: images or rows into WebDataset tar shards, documents into shards of tokens."""

import json as json_module
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from dataio.base.progress import ProgressBar
from dataio.source.text.tokenizer import open_tokenizer
from tonari.pack.documents import Split, find_documents
from tonari.pack.inputs import open_input
from tonari.pack.shards import check_directory, write_shards
from tonari.pack.text import pack_text
from tonari.sizes import format_bytes, parse_bytes

__all__ = ["Pack", "main", "write_shards"]

Thing = TypeVar("Thing")


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Turn Parquet or an image folder into tar shards, or documents of text into tokens.

    The shards are the same bytes for the same source, options and seed. Tar shards are in
    WebDataset's conventions; classes of an image folder are numbered in the order of their names,
    which classes.json keeps. With --tokenizer, JSON lines, Parquet and plain text become tokens in
    Megatron's .bin and .idx; after a kill the same command goes on.
    """

    src: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SRC")]]
    """Parquet file, quoted pattern or directory of Parquet files, or a folder of class folders;
    with --tokenizer also .jsonl and .txt, plain or with .gz or .zst."""
    dst: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="DST")]]
    """Directory for the shards; it appears when they are whole."""
    shard_bytes: str | None = None
    """Largest size of a shard: 64MiB unless --shard-samples is given; of tokens 256MiB."""
    shard_samples: int | None = None
    """Samples in each shard, in place of --shard-bytes."""
    shuffle_seed: int | None = None
    """Shuffle the samples by this seed; without it they keep their order."""
    columns: str | None = None
    """Parquet columns to pack, with commas between them: all, unless given. A column `key` or
    `__key__` names the samples."""
    prefix: str = ""
    """Begins the names of the shards; defaults to DST's name, so that data/val has val-*."""
    tokenizer: str | None = None
    """Pack text: `bytes`, a tokenizer.json, or a local directory that holds one."""
    text: str = "text"
    """Key or column of a document's text, of JSON lines and Parquet."""
    end: str | None = None
    """Special token to put behind each document, such as `<|endoftext|>`; none unless given."""
    split: Split = "file"
    """A document of plain text: a whole file, or a block between blank lines."""
    overwrite: bool = False
    """Replace the shards that are in the directory."""
    json: bool = False
    """Print one JSON document and nothing else on stdout."""

    def __post_init__(self) -> None:
        if self.shard_bytes and self.shard_samples is not None:
            raise ValueError("give --shard-bytes or --shard-samples, not both")
        if self.shard_samples is not None and self.shard_samples < 1:
            raise ValueError(f"--shard-samples is {self.shard_samples}, must be >= 1")
        if re.search(r"[/.\s]", self.prefix):
            raise ValueError(f"--prefix is {self.prefix!r}, must hold no dots, slashes or spaces")
        parse_bytes(self.shard_bytes or "64MiB")
        of_rows = (self.shard_samples, self.shuffle_seed, self.columns)
        if self.tokenizer is not None and any(given is not None for given in of_rows):
            raise ValueError(
                "--tokenizer packs text, which takes no --shard-samples, --shuffle-seed or "
                "--columns: give --shard-bytes and --text; training shuffles"
            )

    @property
    def begin(self) -> str:
        """What the names of shards begin with."""
        return self.prefix or re.sub(r"[/.\s]+", "-", self.dst.resolve().name) or "data"

    @property
    def most_bytes(self) -> int | None:
        """Largest size of a shard, if sizes limit it."""
        return None if self.shard_samples else parse_bytes(self.shard_bytes or "64MiB")


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        SourceError: If the source is missing, empty, broken or of no known kind.
        CommandError: If the directory cannot be written, or holds something else.
    """
    options = tyro.cli(Pack, args=argv, prog="tonari pack", config=(tyro.conf.FlagCreatePairsOff,))
    if options.tokenizer is not None:
        return _pack_text(options, options.tokenizer)
    check_directory(options.dst, overwrite=options.overwrite)
    columns = [c.strip() for c in options.columns.split(",")] if options.columns else None
    with tempfile.TemporaryDirectory(prefix="tonari-pack-") as scratch:
        packed = open_input(
            options.src, columns=columns, shuffle_seed=options.shuffle_seed, scratch=Path(scratch)
        )
        shards = write_shards(
            _counted(packed.samples, packed.num_samples),
            options.dst,
            prefix=options.begin,
            shard_samples=options.shard_samples,
            shard_bytes=options.most_bytes,
            classes=packed.classes,
            overwrite=options.overwrite,
        )
    _report(options, shards, packed.num_samples)
    return 0


def _pack_text(options: Pack, tokenizer: str) -> int:
    info = pack_text(
        find_documents(options.src, text=options.text, split=options.split),
        options.dst,
        open_tokenizer(tokenizer),
        end=options.end,
        prefix=options.begin,
        shard_bytes=parse_bytes(options.shard_bytes or "256MiB"),
        overwrite=options.overwrite,
    )
    found = {"shards": len(info.shards), "documents": info.documents, "tokens": info.tokens}
    if options.json:
        print(json_module.dumps({"directory": str(options.dst), **found}))
        return 0
    print(
        f"packed {info.documents:,} documents, {info.tokens:,} tokens of {info.vocabulary:,}, into "
        f"{len(info.shards):,} shards: {options.dst / options.begin}-*.bin"
    )
    return 0


def _counted(samples: Iterable[Thing], total: int) -> Iterator[Thing]:
    progress = ProgressBar("packing", total, shown=True)
    try:
        for sample in samples:
            yield sample
            progress.add(1)
    finally:
        progress.close()


def _report(options: Pack, shards: list[Path], num_samples: int) -> None:
    num_bytes = sum(path.stat().st_size for path in shards)
    if options.json:
        found = {"shards": len(shards), "samples": num_samples, "bytes": num_bytes}
        print(json_module.dumps({"directory": str(options.dst), **found}))
        return
    print(
        f"packed {num_samples:,} samples into {len(shards):,} shards, {format_bytes(num_bytes)}: "
        f"{options.dst / options.begin}-*.tar"
    )
