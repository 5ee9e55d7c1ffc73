"""A pattern -> the shards that it names."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import braceexpand

from dataio.base.errors import SourceError
from dataio.base.location import bare, split_query
from dataio.source.advice import directory_advice
from dataio.source.storage.files import Storage
from dataio.source.storage.retry import GaveUpError
from dataio.source.tables import refuse_table, refuse_tables

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

Names = str | Sequence[str]
"""A pattern, or several."""


def expand(pattern: Names, storage: Storage | None = None) -> list[str]:
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
            f"source: the shard pattern {_shown(pattern)!r} is empty, expected one such as "
            f'"shards/train-{{000000..000127}}.tar"'
        )
    names = [name for part in patterns for name in spelled_out(part, storage)]
    paths = [path for name in names for path in _matches(name, storage)]
    local = [path for path in paths if "://" not in path]
    missing = storage.ask(
        str(names[0]), lambda: [path for path in local if not Path(path).is_file()]
    )
    if missing:
        raise SourceError(
            f"{missing[0]}: no such file; {len(missing)} of the {len(paths)} shards of "
            f"{_shown(pattern)!r} are missing; check the pattern, and that this node sees the "
            "directory"
        )
    return paths


def shown_name(spec: Names) -> str:
    """Name all of them in a few words."""
    if isinstance(spec, str):
        return bare(spec)
    first, last = bare(spec[0]), bare(spec[-1])
    return first if len(spec) == 1 else f"{first} and {len(spec) - 1} more, to {last}"


def is_shard(name: str) -> bool:
    """Whether a file with this name is a shard wherever it lies."""
    return name.endswith(SHARD_SUFFIXES) or NUMBERED.search(name) is not None


def shards_among(names: Iterable[str]) -> list[str]:
    """Choose the shards of a directory: others than the first kind where there is nothing else."""
    listed = list(names)
    for name in listed:
        if is_shard(name.lower()) and not is_shard(name):
            raise SourceError(
                f"{name}: ends in capitals, expected lower case; rename it, or name the shards"
            )
    found = [name for name in listed if is_shard(name)]
    found = found or [name for name in listed if name.endswith(LINE_SUFFIXES)]
    indexes = {name for name in listed if name.endswith(".idx")}
    return found or [
        name
        for name in listed
        if name.endswith(".bin") and f"{name.removesuffix('.bin')}.idx" in indexes
    ]


def spelled_out(pattern: str, storage: Storage) -> list[str]:
    """Expand the braces of a pattern, and name its URLs; what exists as it is written stays.

    Raises:
        SourceError: If the braces do not match.
    """
    if "{" not in pattern and "}" not in pattern:
        return [storage.name(pattern)]
    if "://" not in pattern:
        literal, rest = storage.ask(pattern, lambda: _existing(pattern), doing="looking for it")
        return [literal + name for name in _braces(rest)] if rest else [literal]
    # Behind the path nothing is expanded.
    plain, query = split_query(pattern)
    if _is_there(pattern, storage):
        return [storage.name(pattern)]
    return [storage.name(name + query) for name in _braces(plain)]


def _existing(pattern: str) -> tuple[str, str]:
    """Divide a path behind the part that exists as it is written: all of it, or a directory."""
    if Path(pattern).expanduser().exists():
        return pattern, ""
    end = pattern.rfind("/")
    while end > 0 and not Path(pattern[:end]).expanduser().exists():
        end = pattern.rfind("/", 0, end)
    return pattern[: end + 1], pattern[end + 1 :]


def _is_there(url: str, storage: Storage) -> bool:
    """Whether there is a file of this very name behind a URL, whatever its letters stand for."""
    try:
        return storage.exists(url)
    except SourceError as error:
        if isinstance(error.__cause__, GaveUpError):
            raise
        # What it expands to says what is wrong.
        return False


def _braces(pattern: str) -> list[str]:
    try:
        return list(braceexpand.braceexpand(pattern))
    except ValueError as error:
        raise SourceError(
            f"source: the braces of {bare(pattern)!r} do not match ({error}), expected something "
            f"like {{000000..000127}}"
        ) from error


def local_glob(name: str) -> list[str]:
    """List what a pattern of paths names; brackets in directories that exist are letters."""
    literal, rest = _existing(name)
    root = Path(literal or ".").expanduser()
    found = root.glob(rest) if rest else [root]
    # As it was given: a relative pattern gives relative paths.
    return [str(path) for path in found]


def _shown(pattern: Names) -> str | list[str]:
    return bare(pattern) if isinstance(pattern, str) else [bare(part) for part in pattern]


def _matches(name: str, storage: Storage) -> list[str]:
    if "://" in name:
        found, kind = _remote(name, storage)
    else:
        found, kind = storage.ask(name, lambda: _local(name), doing="listing it")
    if not found:
        raise SourceError(
            f"{name}: the {kind} holds no shard, expected files "
            f"ending in {' or '.join([*SHARD_SUFFIXES, *LINE_SUFFIXES])}; "
            f"{directory_advice(name)}"
        )
    refuse_twins(sorted(found))
    return sorted(found)


def refuse_twins(paths: Sequence[str]) -> None:
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


def _local(name: str) -> tuple[list[str], str]:
    path = Path(name).expanduser()
    if path.is_dir():
        refuse_tables([path])
        return shards_among(map(str, path.iterdir())), "directory"
    if not path.exists() and Path(f"{path}.bin").is_file() and Path(f"{path}.idx").is_file():
        # Megatron names a dataset by what its two files have in common.
        return [f"{path}.bin"], "path"
    if path.exists() or MAGIC.isdisjoint(name):
        return [str(path)], "path"
    found = local_glob(name)
    refuse_tables({Path(each).parent for each in found})
    return found, "glob"


def _remote(name: str, storage: Storage) -> tuple[list[str], str]:
    url = storage.canonical(name)
    if not MAGIC.isdisjoint(url) and not ("[" in url and _is_there(url, storage)):
        base = re.split(r"[*?[]", url)[0].rpartition("/")[0]
        if (found := storage.glob(url)) and "://" in base:
            _children(base, storage)
        return found, "glob"
    # A name that ends like a shard costs no request: there may be thousands.
    if is_shard(url) or storage.is_file_of_url(url):
        return [url], "path"
    children = _children(url, storage)
    return shards_among(children), "directory"


def _children(url: str, storage: Storage) -> list[str]:
    """List a directory behind a URL, unless it is that of a table."""
    children = storage.children(url)
    names = {PurePosixPath(each.rstrip("/")).name: each for each in children}
    refuse_table(bare(url), names, lambda name: storage.children(names[name]))
    return children
