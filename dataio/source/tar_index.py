"""Where samples lie in a tar shard: by its headers, or by the indexes that others publish."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataio.atomic import write_file
from dataio.errors import SourceError
from dataio.source.files import Storage, StorageFile
from dataio.source.tar_headers import Member, split_name, walk_members
from dataio.source.window import HEADER_BYTES, Window, skip_piece_bytes

VERSION = "v1.2"


@dataclass(frozen=True)
class ShardIndex:
    """The samples of a shard.

    Attributes:
        keys: Name of each sample.
        members: For each sample, (offset, num_bytes) of its members by extension.
    """

    keys: list[str]
    members: list[dict[str, tuple[int, int]]]

    def __len__(self) -> int:
        return len(self.keys)


def scan_shard(file: StorageFile) -> ShardIndex:
    """Find the samples of a tar shard by its headers, around the members where these are large.

    Raises:
        SourceError: If it is no tar file, truncated, or a sample has two members of one extension.
    """
    return _index(file.path, _scan(file))


def index_path(shard_path: str) -> str:
    """Name the ``.idx`` that belongs to a shard."""
    return f"{shard_path.removesuffix('.tar')}.idx"


def read_index(storage: Storage, shard_path: str) -> ShardIndex | None:
    """Read the ``.idx`` of a shard, if there is one.

    Raises:
        SourceError: If it is not in DALI's form v1.2.
    """
    path = index_path(shard_path)
    if not storage.exists(path):
        return None
    with storage.open(path) as file:
        head, *lines = file.read_at(0, file.size).decode(errors="surrogateescape").splitlines() or [
            ""
        ]
    count = _count(path, head)
    index = _index(path, _parse(path, lines))
    if len(lines) != count or len(index) != count:
        raise _bad_index(path, f"{len(index)} samples in {len(lines)} lines", f"{count} as it says")
    return index


def count_samples(storage: Storage, shard_path: str) -> int:
    """Count the samples of a shard: by the first line of its ``.idx``, else by its headers."""
    path = index_path(shard_path)
    if storage.exists(path):
        with storage.open(path) as file:
            head = file.read_at(0, 64).decode(errors="replace")
        return _count(path, head.partition("\n")[0])
    with storage.open(shard_path) as file:
        return sum(1 for _ in _samples(file.path, _scan(file)))


def listed_counts(storage: Storage, shard_paths: Sequence[str]) -> list[int] | None:
    """Count the samples of all shards by wids' ``index.json`` beside them; None if it lacks any.

    Raises:
        SourceError: If there is one that is not JSON.
    """
    listed: dict[str, dict[str, int]] = {}
    counts = []
    for path in shard_paths:
        directory, slash, name = path.rpartition("/")
        if directory not in listed:
            listed[directory] = _listed(storage, f"{directory}{slash}index.json")
        if name not in listed[directory]:
            return None
        counts.append(listed[directory][name])
    return counts


def write_index(shard_path: Path) -> Path:
    """Write the ``.idx`` of a shard as DALI's wds2idx does, so that parts of it can be read.

    Raises:
        SourceError: If the shard is broken, or a name holds white space, which the form cannot say.
    """
    lines = []
    with Storage().open(str(shard_path)) as file:
        for key, members in _samples(file.path, _scan(file)):
            if any(character.isspace() for member in members for character in member.name):
                raise SourceError(
                    f"{shard_path}: found white space in the name of sample {key!r}, expected "
                    "names that an index of words can hold; rename its members, or do without "
                    "the index"
                )
            lines.append(
                " ".join(
                    f"{m.name[len(key) + 1 :]} {m.offset} {m.num_bytes} {m.name}" for m in members
                )
            )
    path = Path(index_path(str(shard_path)))
    text = "\n".join([f"{VERSION} {len(lines)}", *lines, ""])
    write_file(path, text.encode(errors="surrogateescape"))
    return path


def duplicate_member(path: str, key: str, extension: str) -> SourceError:
    """Say that a sample has two members of one extension."""
    return SourceError(
        f"{path}: sample {key!r} has two members {extension!r}, expected one; write the shard "
        "again with names that differ before their first dot"
    )


def _scan(file: StorageFile) -> Iterator[Member]:
    window = Window(file)
    window.piece_bytes = HEADER_BYTES
    for member in walk_members(window):
        window.piece_bytes = skip_piece_bytes(member.num_bytes)
        yield member


def _samples(path: str, members: Iterable[Member]) -> Iterator[tuple[str, list[Member]]]:
    """Group members that follow one another under one key."""
    key: str | None = None
    group: dict[str, Member] = {}
    for member in members:
        if member.key != key:
            if key is not None:
                yield key, list(group.values())
            key, group = member.key, {}
        if member.extension in group:
            raise duplicate_member(path, member.key, member.extension)
        group[member.extension] = member
    if key is not None:
        yield key, list(group.values())


def _index(path: str, members: Iterable[Member]) -> ShardIndex:
    index = ShardIndex([], [])
    for key, group in _samples(path, members):
        index.keys.append(key)
        index.members.append({m.extension: (m.offset, m.num_bytes) for m in group})
    return index


def _count(path: str, head: str) -> int:
    version, _, count = head.strip().partition(" ")
    if version != VERSION or not count.isdecimal():
        raise _bad_index(
            path, repr(head[:40]), f"'{VERSION} <number of samples>' in its first line"
        )
    return int(count)


def _parse(path: str, lines: Iterable[str]) -> Iterator[Member]:
    for number, line in enumerate(lines, start=2):
        words = line.split(" ")
        if len(words) % 4:
            raise _bad_index(path, f"{len(words)} words in line {number}", "four a member")
        for i in range(0, len(words), 4):
            offset, num_bytes, name = words[i + 1 : i + 4]
            if not (offset.isdecimal() and num_bytes.isdecimal()):
                raise _bad_index(
                    path, f"{offset!r} {num_bytes!r} in line {number}", "offset and size"
                )
            if parts := split_name(name):
                yield Member(*parts, int(offset), int(num_bytes), name)


def _bad_index(path: str, found: str, expected: str) -> SourceError:
    return SourceError(
        f"{path}: found {found}, expected {expected}; remove the index, or write it again with "
        "`tonari pack`"
    )


def _listed(storage: Storage, path: str) -> dict[str, int]:
    if not storage.exists(path):
        return {}
    with storage.open(path) as file:
        text = file.read_at(0, file.size)
    try:
        document = json.loads(text)
        entries = document.get("shardlist", []) if isinstance(document, dict) else []
        return {str(e["url"]).rpartition("/")[2]: int(e["nsamples"]) for e in entries}
    except (ValueError, KeyError, TypeError) as error:
        expected = '{"shardlist": [{"url": ..., "nsamples": ...}]}'
        raise _bad_index(path, f"something else ({error!r})", expected) from error
