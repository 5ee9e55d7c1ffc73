"""A pattern -> the shards that it names."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import braceexpand

from dataio.base.errors import SourceError
from dataio.source.advice import directory_advice
from dataio.source.io.files import Storage

RECORD_SUFFIXES = tuple(
    suffix + packed for suffix in (".tfrecord", ".tfrecords", ".tfrec") for packed in ("", ".gz")
)
SHARD_SUFFIXES = (
    *(".tar", ".tar.gz", ".tgz", ".parquet", ".arrow", ".feather", ".ipc"),
    *(".mds", ".mds.zstd", ".mds.gz", ".mds.bz2", *RECORD_SUFFIXES),
)
LINE_SUFFIXES = tuple(
    suffix + packed for suffix in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst", ".zstd")
)
"""Files that often lie beside shards, with notes about them: alone they are shards."""
NUMBERED = re.compile(r"-\d{5}-of-\d{5}(\.gz)?$")
"""How TensorFlow names TFRecord shards, with any suffix before, or none."""
CHUNK = re.compile(r"(^|/)chunk-\d+-\d+(\.zstd)?\.bin$")
"""How LitData names its chunks."""
PACKED = re.compile(r"\.(gz|zst|zstd|bz2)$")
"""What follows the suffix of a shard that is compressed as a whole."""
MAGIC = frozenset("*?[")


def expand(pattern: str | Sequence[str], storage: Storage | None = None) -> list[str]:
    """List the shards that a pattern names.

    Args:
        pattern: A path, a brace pattern (``train-{000000..000127}.tar``), a glob, a directory,
            a URL, or several.
        storage: Asks for what there is; by default one of its own.

    Returns:
        Paths: Braces and lists in their order, globs and directories sorted.

    Raises:
        SourceError: If the pattern is empty, matches nothing, or names files that are missing.
    """
    storage = storage if storage is not None else Storage()
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    if not patterns or not all(patterns):
        raise SourceError(
            f"source: the shard pattern {pattern!r} is empty, expected one such as "
            f'"shards/train-{{000000..000127}}.tar"'
        )
    names = [name for part in patterns for name in braces(part)]
    paths = [path for name in names for path in _matches(name, storage)]
    local = [path for path in paths if "://" not in path]
    missing = storage.ask(
        str(names[0]), lambda: [path for path in local if not Path(path).is_file()]
    )
    if missing:
        raise SourceError(
            f"{missing[0]}: no such file; {len(missing)} of the {len(paths)} shards of "
            f"{pattern!r} are missing; check the pattern, and that this node sees the directory"
        )
    return paths


def is_shard(name: str) -> bool:
    """Whether a file with this name is a shard wherever it lies."""
    return name.endswith(SHARD_SUFFIXES) or NUMBERED.search(name) is not None


def shards_among(names: Iterable[str]) -> list[str]:
    """Choose the shards of a directory: others than the first kind where there is nothing else."""
    listed = list(names)
    found = [name for name in listed if is_shard(name)]
    found = found or [name for name in listed if name.endswith(LINE_SUFFIXES)]
    indexes = {name for name in listed if name.endswith(".idx")}
    return found or [
        name
        for name in listed
        if name.endswith(".bin") and f"{name.removesuffix('.bin')}.idx" in indexes
    ]


def braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern.

    Raises:
        SourceError: If they do not match.
    """
    try:
        return list(braceexpand.braceexpand(pattern))
    except ValueError as error:
        raise SourceError(
            f"source: the braces of {pattern!r} do not match ({error}), expected something like "
            f"{{000000..000127}}"
        ) from error


def _matches(name: str, storage: Storage) -> list[str]:
    find = _remote if "://" in name else _local
    found, kind = storage.ask(name, lambda: find(name, storage), doing="listing it")
    if not found:
        raise SourceError(
            f"{name}: the {kind} holds no shard, expected files "
            f"ending in {' or '.join([*SHARD_SUFFIXES, *LINE_SUFFIXES])}; "
            f"{directory_advice(name)}"
        )
    _refuse_twins(sorted(found))
    return sorted(found)


def _refuse_twins(paths: Sequence[str]) -> None:
    """Refuse a shard beside its own compressed copy, as both would be read.

    Raises:
        SourceError: If there is one.
    """
    plain: dict[str, str] = {}
    for path in paths:
        other = plain.setdefault(PACKED.sub("", path.replace(".tgz", ".tar")), path)
        if other != path:
            raise SourceError(
                f"{path}: found beside {other}, which is named as the same shard compressed in "
                "another way, expected one of the two, as each sample would come twice; remove "
                "one, or name the shards"
            )


def _local(name: str, storage: Storage) -> tuple[list[str], str]:
    path = Path(name).expanduser()
    if path.is_dir():
        return shards_among(map(str, path.iterdir())), "directory"
    if not path.exists() and Path(f"{path}.bin").is_file() and Path(f"{path}.idx").is_file():
        # Megatron names a dataset by what its two files have in common.
        return [f"{path}.bin"], "path"
    if path.exists() or MAGIC.isdisjoint(name):
        return [str(path)], "path"
    root = Path(path.anchor)
    return [str(match) for match in root.glob(str(path.relative_to(root)))], "glob"


def _remote(name: str, storage: Storage) -> tuple[list[str], str]:
    remote = storage.remote(name)
    url = remote.canonical(name)
    if not MAGIC.isdisjoint(url):
        return remote.glob(url), "glob"
    # A name that ends like a shard costs no request: there may be thousands.
    if is_shard(url) or remote.is_file(url):
        return [url], "path"
    return shards_among(remote.children(url)), "directory"
