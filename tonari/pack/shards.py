"""Write samples as tar shards that look whole only when they are."""

import contextlib
import io
import json
import re
import shutil
import tarfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NoReturn

from dataio.base.errors import SourceError
from dataio.source import write_index
from tonari.errors import CommandError

BLOCK = 512
END = bytes(2 * BLOCK)
INDEX = "index.json"
CLASSES = "classes.json"

Sample = Mapping[str, str | bytes]
"""``__key__``, a str without dots in its last part, and a bytes value for each extension."""


def write_shards(
    samples: Iterable[Sample],
    directory: Path,
    *,
    prefix: str = "train",
    shard_samples: int | None = None,
    shard_bytes: int | None = None,
    classes: list[str] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write samples as ``directory/prefix-000000.tar`` and so on, with ``index.json`` beside them.

    The shards follow WebDataset's conventions and are the same bytes for the same samples; each has
    an ``.idx``, and ``index.json`` has the form of wids. All is written into a hidden directory
    beside ``directory`` and renamed when it is whole.

    Args:
        samples: At least one; all with the same extensions.
        directory: Must be absent or empty, unless overwritten.
        prefix: Begins the shards' names.
        shard_samples: Samples in each shard, >= 1; the last may hold fewer.
        shard_bytes: Instead, largest size of a shard; one that holds a single sample may be larger.
        classes: Names of the classes by label, for ``classes.json``.
        overwrite: Replace what an earlier call wrote there.

    Returns:
        The shards, in order.

    Raises:
        SourceError: If there are no samples, they differ, or a key cannot be a name.
        CommandError: If the directory cannot be written, or holds something else.
    """
    if (shard_samples is None) == (shard_bytes is None):
        raise ValueError("write_shards: give shard_samples or shard_bytes, and not both")
    if min(shard_samples or 1, shard_bytes or 1) < 1:
        raise ValueError("write_shards: shard_samples and shard_bytes must be >= 1")
    check_directory(directory, overwrite=overwrite)
    try:
        with _renamed_when_whole(directory) as partial:
            counts = _write_tars(samples, partial, prefix, shard_samples, shard_bytes)
            _write_lists(partial, directory.name, counts, classes)
    except OSError as error:
        raise CommandError(
            f"{directory}: cannot be written: {error.strerror or error}; free some space there, "
            "make its parent writable, or name another directory"
        ) from error
    return [directory / name for name in counts]


def check_directory(directory: Path, *, overwrite: bool) -> None:
    """Refuse a directory that shards cannot be written to, before any work is done.

    Raises:
        CommandError: If it is not one, or holds anything that ``write_shards`` would not replace.
    """
    if directory.exists() and not directory.is_dir():
        raise CommandError(f"{directory}: is a file, expected a directory; name another one")
    found = {path.name for path in directory.iterdir()} if directory.exists() else set()
    if found and not overwrite:
        raise CommandError(
            f"{directory}: is not empty (holds {min(found)}), expected a new directory; name "
            "another one, or give --overwrite to replace the shards in it"
        )
    foreign = found - _own_files(directory / INDEX)
    if foreign:
        raise CommandError(
            f"{directory}: holds {min(foreign)}, which is no part of a packed dataset; --overwrite "
            "replaces nothing else: name another directory"
        )


def _write_tars(
    samples: Iterable[Sample], directory: Path, prefix: str, most: int | None, room: int | None
) -> dict[str, int]:
    """Return the samples in each shard, by its name."""
    counts: dict[str, int] = {}
    name = ""
    file: BinaryIO = io.BytesIO()
    with contextlib.ExitStack() as opened:
        for packed in _packed(samples):
            over = room is not None and file.tell() + len(packed) + len(END) > room
            if not counts or over or counts[name] == most:
                opened.close()
                name = f"{prefix}-{len(counts):06d}.tar"
                counts[name] = 0
                file = opened.enter_context(open(directory / name, "wb"))
                opened.callback(file.write, END)
            file.write(packed)
            counts[name] += 1
    if not counts:
        raise SourceError("source: found no samples, expected at least one; check what is packed")
    return counts


def _packed(samples: Iterable[Sample]) -> Iterator[bytes]:
    """Turn each sample into its members, headers and padding included."""
    keys: set[str] = set()
    expected: list[str] = []
    for number, sample in enumerate(samples):
        key = sample["__key__"]
        found = sorted(sample.keys() - {"__key__"})
        expected = expected or found
        if not isinstance(key, str) or not re.fullmatch(r"(?!__|\._)(\S+/)?[^\s./]+", key):
            _refuse(
                number, f"key {key!r}", "no white space, no dot in its last part, no leading __"
            )
        if key in keys:
            _refuse(number, f"key {key!r} a second time", "another one")
        if found != expected or not found:
            _refuse(number, f"the fields {found}", f"{expected or 'some'} as in the first sample")
        keys.add(key)
        yield b"".join(_member(f"{key}.{name}", sample[name]) for name in found)


def _member(name: str, data: str | bytes) -> bytes:
    if not isinstance(data, bytes):
        raise TypeError(f"write_shards: {name} is {type(data).__name__}, must be bytes")
    # Owner and time stay 0: the same samples make the same bytes.
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info.tobuf() + data + bytes(-len(data) % BLOCK)


def _write_lists(
    directory: Path, name: str, counts: Mapping[str, int], classes: list[str] | None
) -> None:
    for shard in counts:
        write_index(directory / shard)
    if classes is not None:
        (directory / CLASSES).write_text(json.dumps(classes, indent=1))
    shardlist = [
        {"url": shard, "nsamples": count, "filesize": (directory / shard).stat().st_size}
        for shard, count in counts.items()
    ]
    index = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": name}
    (directory / INDEX).write_text(json.dumps({**index, "shardlist": shardlist}, indent=1))


def _own_files(index: Path) -> set[str]:
    """Name the files that ``write_shards`` wrote beside an ``index.json``."""
    try:
        shards = [shard["url"] for shard in json.loads(index.read_text())["shardlist"]]
        return {INDEX, CLASSES, *shards, *(shard.removesuffix(".tar") + ".idx" for shard in shards)}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


@contextlib.contextmanager
def _renamed_when_whole(directory: Path) -> Iterator[Path]:
    directory.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    partial = directory.with_name(f".{directory.name}.partial-{mark}")
    partial.mkdir()
    try:
        yield partial
        if directory.exists():
            old = directory.with_name(f".{directory.name}.old-{mark}")
            directory.rename(old)
            partial.rename(directory)
            shutil.rmtree(old)
        else:
            partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse(number: int, found: str, expected: str) -> NoReturn:
    raise SourceError(
        f"sample {number}: has {found}, expected {expected}; change it in the source and pack again"
    )
