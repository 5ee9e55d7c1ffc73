"""A pattern -> the shards that it names."""

from collections.abc import Sequence
from pathlib import Path

import braceexpand

from dataio.base.errors import SourceError
from dataio.source.io.files import Storage

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".parquet", ".arrow", ".feather", ".ipc")
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
            f"ending in {' or '.join(SHARD_SUFFIXES)}; check the path, and that this node sees it"
        )
    return sorted(found)


def _local(name: str, storage: Storage) -> tuple[list[str], str]:
    path = Path(name).expanduser()
    if path.is_dir():
        found = [str(child) for child in path.iterdir() if child.name.endswith(SHARD_SUFFIXES)]
        return found, "directory"
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
    if url.endswith(SHARD_SUFFIXES) or remote.is_file(url):
        return [url], "path"
    children = remote.children(url)
    return [child for child in children if child.endswith(SHARD_SUFFIXES)], "directory"
