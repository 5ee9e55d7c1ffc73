"""Text into shards of tokens: read, encode and write side by side, and go on after a kill."""

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.atomic import read_record, write_file, write_record
from dataio.base.errors import DamagedFileError, SourceError
from dataio.base.progress import ProgressBar
from dataio.source.text.dataset import INFO, LINES, SOURCES, TextInfo, read_info, token_dtype
from dataio.source.text.tokenizer import FILE, Tokenizer
from tonari.errors import CommandError
from tonari.pack.documents import Documents
from tonari.pack.tokens import TokenShard

BATCH_CHARACTERS = 2 << 20
"""They are encoded at once: enough for all cores, and little memory."""
PROGRESS, LOCK = OURS = "progress.json", "lock"


@dataclass(frozen=True, kw_only=True)
class Done:
    """How far a pack has come: what the shards that are whole hold.

    Attributes:
        identity: Of the documents and the options.
        shards: Their names.
        documents: Documents in them.
        tokens: Tokens in them.
        file: The file that is read next, by its number.
        read: Documents of that file which were read.
    """

    identity: str
    shards: tuple[str, ...] = ()
    documents: int = 0
    tokens: int = 0
    file: int = 0
    read: int = 0


@dataclass(frozen=True)
class Batch:
    """Documents that are encoded at once.

    Attributes:
        texts: The documents.
        places: Of each the number of its file, its own number there, and its line.
        read_bytes: Of the files that are behind these documents.
    """

    texts: list[str]
    places: list[tuple[int, int, int]]
    read_bytes: int


def pack_text(
    documents: Documents, directory: Path, tokenizer: Tokenizer, *, end: str | None = None,
    prefix: str = "text", shard_bytes: int = 256 << 20, overwrite: bool = False,
) -> TextInfo:  # fmt: skip
    """Write the tokens of documents as Megatron's ``.bin`` and ``.idx``, with ``text.json`` beside.

    All is written into ``.NAME.partial`` beside the directory, and renamed when it is whole. After
    a kill the same call goes on behind the last whole shard, and gives the same bytes.

    Args:
        documents: What to pack; documents without a token are left out.
        directory: Must be absent or empty, unless overwritten.
        tokenizer: Turns a document into tokens; its file is kept beside the shards.
        end: A special token to put behind each document; None: none is put.
        prefix: Begins the names of the shards.
        shard_bytes: Largest size of a ``.bin``; one that holds a single document may be larger.
        overwrite: Replace a packed text that is there, or an unfinished one of other options.

    Returns:
        What is in the directory.

    Raises:
        SourceError: If a document cannot be read, there are none, or no token is named ``end``.
        CommandError: If the directory cannot be written, or holds something else.
    """
    check_text_directory(directory, overwrite=overwrite)
    last = None if end is None else tokenizer.token(end)
    files = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in documents.paths]
    asked = [files, documents.text, documents.split, tokenizer.digest, last, prefix, shard_bytes]
    identity = xxhash.xxh3_128_hexdigest(repr(asked).encode())
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        with _opened(partial, identity, overwrite=overwrite) as done:
            writer = _Writer(partial, tokenizer, last, prefix, shard_bytes, done)
            done = writer.write(documents, sizes=[path.stat().st_size for path in documents.paths])
            if not done.tokens:
                shutil.rmtree(partial)
                raise SourceError(
                    f"{documents.paths[0]}: found no text in {len(documents.paths)} files, "
                    "expected at least one document that is not empty; check what is packed"
                )
            info = TextInfo(
                tokenizer=tokenizer.name, digest=tokenizer.digest, vocabulary=tokenizer.vocabulary,
                end=last, dtype=token_dtype(tokenizer.vocabulary).name, documents=done.documents,
                tokens=done.tokens, shards=done.shards,
            )  # fmt: skip
            if tokenizer.document is not None:
                write_file(partial / FILE, tokenizer.document)
            names = [str(path) for path in documents.paths]
            write_file(partial / SOURCES, json.dumps(names, indent=0).encode())
            write_file(partial / INFO, info.to_json())
            # What another pack has written meanwhile is refused as it would have been before.
            check_text_directory(directory, overwrite=overwrite)
            if directory.exists():
                shutil.rmtree(directory)
            partial.rename(directory)
            # Until now they kept others out.
            for name in OURS:
                (directory / name).unlink()
    except OSError as error:
        raise CommandError(
            f"{directory}: cannot be written: {error.strerror or error}; free some space there, "
            "make its parent writable, or name another directory; the same command goes on"
        ) from error
    return info


def check_text_directory(directory: Path, *, overwrite: bool) -> None:
    """Refuse a directory that text cannot be packed into, before any work is done.

    Raises:
        CommandError: If it is not one, or holds anything that `pack_text` would not replace.
    """
    if directory.exists() and not directory.is_dir():
        raise CommandError(f"{directory}: is a file, expected a directory; name another one")
    found = {path.name for path in directory.iterdir()} if directory.exists() else set()
    if found and not overwrite:
        raise CommandError(
            f"{directory}: is not empty (holds {min(found)}), expected a new directory; name "
            "another one, or give --overwrite to replace the packed text in it"
        )
    own: set[str] = set()
    with contextlib.suppress(SourceError):
        shards = read_info(directory).shards
        beside = {Path(name).with_suffix(end).name for name in shards for end in (".idx", LINES)}
        own = {INFO, FILE, SOURCES, *OURS, *shards, *beside}
    if foreign := found - own:
        raise CommandError(
            f"{directory}: holds {min(foreign)}, which is no part of a packed text; --overwrite "
            "replaces nothing else: name another directory"
        )


@contextlib.contextmanager
def _opened(partial: Path, identity: str, *, overwrite: bool) -> Iterator[Done]:
    """Lock the unfinished directory, and find how far it has come."""
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial / LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CommandError(
                f"{partial}: another pack is writing here, expected none; wait until it ends, or "
                "name another directory"
            ) from error
        done = _read_progress(partial)
        if done is not None and done.identity != identity and not overwrite:
            raise CommandError(
                f"{partial}: holds an unfinished pack of other documents or options, expected one "
                "of these; give the same as then to go on, or --overwrite to begin anew"
            )
        if done is None or done.identity != identity:
            _clear(partial)
            done = Done(identity=identity)
            write_record(partial / PROGRESS, asdict(done))
        yield done


def _clear(partial: Path) -> None:
    """Remove what an unfinished pack has left, which would come into the directory."""
    progress = partial / PROGRESS
    found = [path for path in partial.iterdir() if not path.name.startswith(OURS)]
    if found and not progress.exists():
        raise CommandError(
            f"{partial}: holds {found[0].name}, which no pack has left there, expected what an "
            "unfinished one leaves; move it away, or name another directory"
        )
    for path in found:
        path.unlink()
    # Last: what a kill leaves here is known as a pack's by it.
    progress.unlink(missing_ok=True)


def _read_progress(partial: Path) -> Done | None:
    try:
        found: Mapping[str, object] = read_record(partial / PROGRESS)
        return Done(**{**found, "shards": tuple(found["shards"])})  # type: ignore[arg-type]
    except (OSError, DamagedFileError, TypeError, KeyError):
        return None


class _Writer:
    """Writes the shards that are not whole yet."""

    def __init__(
        self, partial: Path, tokenizer: Tokenizer, last: int | None, prefix: str, shard_bytes: int,
        done: Done,
    ) -> None:  # fmt: skip
        self._partial, self._tokenizer, self._prefix = partial, tokenizer, prefix
        self._end = None if last is None else np.array([last], np.int64)
        self._dtype = token_dtype(tokenizer.vocabulary)
        self._shard_bytes = shard_bytes
        self._done = done
        self._shard: TokenShard | None = None

    def write(self, documents: Documents, *, sizes: Sequence[int]) -> Done:
        """Pack what is left; returns what there is in the end."""
        progress = ProgressBar("packing", sum(sizes) >> 20, shown=True, unit="MiB of input")
        shown = 0
        batches = _batches(documents, sizes, self._done)
        try:
            # Encoding does not hold Python's lock: the next batch is read meanwhile.
            with ThreadPoolExecutor(1, thread_name_prefix="tonari-encode") as thread:
                for batch, tokens in _encoded(thread, self._tokenizer, batches):
                    self._write(batch, tokens)
                    progress.add((batch.read_bytes >> 20) - shown)
                    shown = batch.read_bytes >> 20
            if self._shard is not None:
                self._finish(file=len(sizes), read=0)
        finally:
            progress.close()
            if self._shard is not None:
                self._shard.close()
        return self._done

    def _write(self, batch: Batch, tokens: list[NDArray[np.int64]]) -> None:
        """Write a batch's documents, and begin another shard where one is full."""
        held: list[NDArray[np.int64]] = []
        places: list[tuple[int, int]] = []
        held_bytes = 0
        for (file, number, line), found in zip(batch.places, tokens, strict=True):
            if not len(found):
                continue
            document = found if self._end is None else np.append(found, self._end)
            num_bytes = len(document) * self._dtype.itemsize
            before = held_bytes + (0 if self._shard is None else self._shard.num_bytes)
            if before and before + num_bytes > self._shard_bytes:
                self._open().add(held, places)
                self._finish(file=file, read=number)
                held, places, held_bytes = [], [], 0
            held.append(document)
            places.append((file, line))
            held_bytes += num_bytes
        if held:
            self._open().add(held, places)

    def _open(self) -> TokenShard:
        if self._shard is None:
            name = f"{self._prefix}-{len(self._done.shards):06d}.bin"
            self._shard = TokenShard(self._partial / name, self._dtype)
        return self._shard

    def _finish(self, *, file: int, read: int) -> None:
        shard = self._open()
        shard.finish()
        self._done = replace(
            self._done, shards=(*self._done.shards, shard.path.name), file=file, read=read,
            documents=self._done.documents + shard.num_documents,
            tokens=self._done.tokens + shard.num_tokens,
        )  # fmt: skip
        write_record(self._partial / PROGRESS, asdict(self._done))
        self._shard = None


def _encoded(
    thread: ThreadPoolExecutor, tokenizer: Tokenizer, batches: Iterator[Batch]
) -> Iterator[tuple[Batch, list[NDArray[np.int64]]]]:
    """Encode batches, one of them while those before and after it are written and read."""
    before: tuple[Batch, Future[list[NDArray[np.int64]]]] | None = None
    for batch in batches:
        under_way = batch, thread.submit(tokenizer.encode, batch.texts)
        if before is not None:
            yield before[0], before[1].result()
        before = under_way
    if before is not None:
        yield before[0], before[1].result()


def _batches(documents: Documents, sizes: Sequence[int], done: Done) -> Iterator[Batch]:
    texts: list[str] = []
    places: list[tuple[int, int, int]] = []
    num_characters = 0
    for file in range(done.file, len(sizes)):
        first = done.read if file == done.file else 0
        for number, (line, text) in enumerate(islice(documents.of(file), first, None), first):
            texts.append(text)
            places.append((file, number, line))
            num_characters += len(text)
            if num_characters >= BATCH_CHARACTERS:
                yield Batch(texts, places, sum(sizes[:file]))
                texts, places, num_characters = [], [], 0
    yield Batch(texts, places, sum(sizes))
