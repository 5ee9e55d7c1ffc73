"""Where samples lie in a tar shard: by its headers, or by the indexes that others publish."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from dataio.base.atomic import write_file
from dataio.base.errors import SourceError
from dataio.source.base import SampleCounts
from dataio.source.formats.seek_points import spacing_bytes
from dataio.source.formats.tar.counting import check_keys
from dataio.source.formats.tar.headers import (
    BLOCK,
    MOST_END_BYTES,
    as_text,
    is_end_marker,
    split_name,
)
from dataio.source.formats.tar.samples import Samples, duplicate_member, walk_samples
from dataio.source.storage.files import Storage, StorageFile
from dataio.source.storage.window import FileWindow

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
    index = ShardIndex([], [])
    for samples in walk_samples(FileWindow(file)):
        names, extents = list(samples.extensions.codes), samples.extents()
        members = [(names[code], at) for code, at in zip(samples.code, extents, strict=True)]
        cuts = [*samples.first_members().tolist(), len(members)]
        index.keys.extend(map(as_text, samples.keys(samples.first_members())))
        index.members.extend(dict(members[a:b]) for a, b in pairwise(cuts))
    return index


def index_path(shard_path: str) -> str:
    """Name the ``.idx`` that belongs to a shard."""
    return f"{shard_path.removesuffix('.tar')}.idx"


def read_index(storage: Storage, shard_path: str) -> ShardIndex | None:
    """Read the ``.idx`` of a shard, if there is one.

    Raises:
        SourceError: If it is not in DALI's form v1.2.
    """
    path, lines = index_path(shard_path), _read_lines(storage, shard_path)
    if lines is None:
        return None
    index = _index(path, _parse(path, (as_text(line) for line in lines)))
    if len(index) != len(lines):
        raise _bad_index(path, f"{len(index)} samples in {len(lines)} lines", "one in each")
    return index


def counts_by_index(storage: Storage, shard_path: str) -> SampleCounts | None:
    """Count the samples of a shard by its ``.idx``; None if there is none.

    What it lists must end where the shard's end marker begins. Whether samples begin where it says
    is seen by whoever reads the shard.

    Raises:
        SourceError: If it is not in DALI's form v1.2, not of the shard as it is now, or a key comes
            again.
    """
    path, lines = index_path(shard_path), _read_lines(storage, shard_path)
    if not lines:
        return None
    with storage.open(shard_path) as file:
        step = -(-len(lines) * spacing_bytes(file.size) // max(file.size, 1))
        numbers = np.append(np.arange(step, len(lines), step), len(lines))
        # int64[num_points + 1]: where a sample begins behind the one before, and where all end
        begins = np.array([_end(path, number, lines[number - 1]) for number in numbers.tolist()])
        end = file.view_at(int(begins[-1]), MOST_END_BYTES + 1)
        num_bytes = file.size
    if not (np.diff(begins) > 0).all() or not is_end_marker(end):
        raise SourceError(
            f"{path}: found {len(lines)} samples up to byte {begins[-1]}, expected them in order, "
            f"and behind them the end of {shard_path}, which has {num_bytes} bytes; one of the two "
            "was changed or is damaged: remove the index if it is the older, else copy the shard "
            "again"
        )
    check_keys(shard_path, _keys(path, lines))
    return SampleCounts([len(lines)], np.stack([numbers, begins], axis=1)[:-1])


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
        SourceError: If the shard is broken, a key comes again, or a name holds white space, which
            the form cannot say.
    """
    lines, keys = [], list[bytes]()
    with Storage().open(str(shard_path)) as file:
        for samples in walk_samples(FileWindow(file)):
            firsts, extents = samples.first_members(), samples.extents()
            keys += samples.keys(firsts)
            words = [_words(samples, i, at, file.path) for i, at in enumerate(extents)]
            lines += [" ".join(words[a:b]) for a, b in pairwise([*firsts.tolist(), len(words)])]
    check_keys(str(shard_path), keys)
    path = Path(index_path(str(shard_path)))
    text = "\n".join([f"{VERSION} {len(lines)}", *lines, ""])
    write_file(path, text.encode(errors="surrogateescape"))
    return path


def _words(samples: Samples, member: int, extent: tuple[int, int], path: str) -> str:
    """Say in an index where a member is."""
    name, key_bytes = as_text(samples.names[member]), samples.members.key_bytes[member]
    if any(character.isspace() for character in name):
        key = as_text(samples.names[member][:key_bytes])
        raise SourceError(
            f"{path}: found white space in the name of sample {key!r}, expected names that an "
            "index of words can hold; rename its members, or do without the index"
        )
    extension = as_text(samples.names[member][key_bytes + 1 :])
    return f"{extension} {extent[0]} {extent[1]} {name}"


def _read_lines(storage: Storage, shard_path: str) -> list[bytes] | None:
    """Read the lines of an ``.idx``, one for each sample, if there is one."""
    path = index_path(shard_path)
    if not storage.exists(path, is_optional=True):
        return None
    with storage.open(path) as file:
        head, *lines = file.read_at(0, file.size).rstrip(b"\n").split(b"\n")
    version, _, count = head.decode(errors="replace").strip().partition(" ")
    if version != VERSION or not count.isdecimal():
        expected = f"'{VERSION} <number of samples>' in its first line"
        raise _bad_index(path, repr(as_text(head[:40])), expected)
    if len(lines) != int(count):
        raise _bad_index(path, f"{len(lines)} lines", f"{count} as its first says")
    return lines


def _end(path: str, number: int, line: bytes) -> int:
    """Find where the last member ends that a line lists."""
    *_, (offset, num_bytes) = (
        (at, size) for _, _, at, size in _parse(path, [as_text(line)], number + 1)
    )
    return -(-(offset + num_bytes) // BLOCK) * BLOCK


def _keys(path: str, lines: Sequence[bytes]) -> list[bytes]:
    """The key of each line's first member."""
    try:
        names = [line.split(b" ", 4)[3] for line in lines]
    except IndexError as error:
        raise _bad_index(path, "a line of fewer than four words", "four a member") from error
    return [name[: name.find(b".", name.rfind(b"/") + 1)] for name in names]


def _index(path: str, members: Iterable[tuple[str, str, int, int]]) -> ShardIndex:
    """Group members (key, extension, offset, num_bytes) that follow one another under one key."""
    index = ShardIndex([], [])
    for key, extension, offset, num_bytes in members:
        if not index.keys or key != index.keys[-1]:
            index.keys.append(key)
            index.members.append({})
        if extension in index.members[-1]:
            raise duplicate_member(path, key, extension)
        index.members[-1][extension] = (offset, num_bytes)
    return index


def _parse(path: str, lines: Iterable[str], first: int = 2) -> Iterator[tuple[str, str, int, int]]:
    for number, line in enumerate(lines, start=first):
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
                yield *parts, int(offset), int(num_bytes)


def _bad_index(path: str, found: str, expected: str) -> SourceError:
    return SourceError(
        f"{path}: found {found}, expected {expected}; remove the index, or write it again with "
        "`tonari pack`"
    )


def _listed(storage: Storage, path: str) -> dict[str, int]:
    if not storage.exists(path, is_optional=True):
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
