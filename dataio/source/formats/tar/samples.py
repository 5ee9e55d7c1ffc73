"""The samples of a tar shard, many at a time: the members of each, and their bytes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.source.formats.tar.headers import LINKED, as_extension, as_text
from dataio.source.formats.tar.links import Links
from dataio.source.formats.tar.members import MEMBERS_AT_ONCE, Members, MemberWalk, join, no_members
from dataio.source.storage.window import HEADER_BYTES, MANY_BYTES, READ_BYTES, File, FileWindow


class Extensions(dict[bytes, int]):
    """Numbers the extensions of a shard as they appear; upper and lower case are one.

    Attributes:
        codes: Each extension's number, in the order of these.
    """

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}

    def __missing__(self, raw: bytes) -> int:
        code = self.codes.setdefault(as_extension(raw), len(self.codes))
        self[raw] = code
        return code


@dataclass(frozen=True)
class Samples:
    """Whole samples that follow one another.

    Attributes:
        members: Their members.
        names: The members' names.
        number: int64[num_members]: The sample that a member belongs to, from the shard's first.
        code: int64[num_members]: A member's extension.
        extensions: What the codes mean.
        links: Where the bytes of members lie that are links.
    """

    members: Members
    names: list[bytes]
    number: NDArray[np.int64]
    code: NDArray[np.int64]
    extensions: Extensions
    links: Links
    window: FileWindow
    held: memoryview
    held_from: int
    kept: list[memoryview]
    """Bytes of the first members, found when the window was there."""

    @property
    def start(self) -> int:
        """Number of the first sample."""
        return int(self.number[0])

    @property
    def stop(self) -> int:
        """Number of the sample after the last."""
        return int(self.number[-1]) + 1

    def until(self, cut: int) -> "Samples":
        """The samples of the first members alone."""
        return replace(
            self,
            members=self.members.part(slice(cut)),
            names=self.names[:cut],
            number=self.number[:cut],
            code=self.code[:cut],
            kept=self.kept[:cut],
        )

    def first_members(self) -> NDArray[np.int64]:
        """int64[num_samples]: The first member of each sample."""
        return np.flatnonzero(np.diff(self.number, prepend=self.start - 1))

    def keys(self, members: NDArray[np.int64]) -> list[bytes]:
        """The keys of the samples that some members belong to."""
        lengths = self.members.key_bytes[members].tolist()
        return [
            self.names[member][:length]
            for member, length in zip(members.tolist(), lengths, strict=True)
        ]

    def key(self, number: int) -> str:
        """A sample's key, for a message."""
        return as_text(self.keys(np.flatnonzero(self.number == number)[:1])[0])

    def held_by(self, number: int) -> list[str]:
        """A sample's extensions."""
        names = list(self.extensions.codes)
        codes = self.code[self.number == number].tolist()
        return [names[code] for code in codes]

    def extents(self) -> list[tuple[int, int]]:
        """(offset, num_bytes) of each member's bytes.

        Raises:
            SourceError: If a member is a link to no file of the shard.
        """
        return [
            self.links.extent(offset) if num_bytes == LINKED else (offset, num_bytes)
            for offset, num_bytes in self.members.extents()
        ]

    def payloads(self, members: NDArray[np.int64]) -> list[memoryview]:
        """View the bytes of some members, given in their order."""
        links = (self.members.num_bytes[members] == LINKED) & (members >= len(self.kept))
        if not links.any():
            return self._payloads(members)
        others = iter(self._payloads(members[~links]))
        return [
            self._view(*self.links.extent(offset)) if is_link else next(others)
            for offset, is_link in zip(self.members.offset[members].tolist(), links, strict=True)
        ]

    def _view(self, offset: int, num_bytes: int) -> memoryview:
        return _whole(self.window.file, self.window.file.view_at(offset, num_bytes), num_bytes)

    def _payloads(self, members: NDArray[np.int64]) -> list[memoryview]:
        num_kept = int(np.searchsorted(members, len(self.kept)))
        views = [self.kept[member] for member in members[:num_kept].tolist()]
        starts = self.members.offset[members[num_kept:]] - self.held_from
        stops = starts + self.members.num_bytes[members[num_kept:]]
        num_held = int(np.searchsorted(stops, len(self.held), side="right"))
        held = self.held
        views += [held[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)][
            :num_held
        ]
        for start, stop in zip(starts[num_held:].tolist(), stops[num_held:].tolist(), strict=True):
            view = self.window.view(self.held_from + start, stop - start)
            views.append(_whole(self.window.file, view, stop - start))
        return views


def _whole(file: File, view: memoryview, num_bytes: int) -> memoryview:
    if len(view) < num_bytes:
        raise SourceError(
            f"{file.path}: found the end of the file in a member of {num_bytes} bytes, expected it "
            "whole; the shard is truncated: copy it again, or write it again with `tonari pack`"
        )
    return view


@dataclass(frozen=True)
class Wanted:
    """What is going to be read.

    Attributes:
        numbers: int64[n]: Samples, sorted, n >= 1.
        extensions: Which members of each.
        mean_bytes: Of a sample.
    """

    numbers: NDArray[np.int64]
    extensions: frozenset[str]
    mean_bytes: int

    def first_from(self, number: int) -> int:
        """Find the first wanted sample that is not before this one; -1 if none is."""
        at = int(np.searchsorted(self.numbers, number))
        return int(self.numbers[at]) if at < len(self.numbers) else -1

    def ahead_bytes(self, number: int) -> int:
        """Choose how much to read at once: not far beyond the last, the rest is another's."""
        left = int(self.numbers[-1]) - number + 1
        return min(max(left * self.mean_bytes, MANY_BYTES), READ_BYTES)


def walk_samples(
    window: FileWindow,
    wanted: Wanted | None = None,
    *,
    start: tuple[int, int] = (0, 0),
    joined: bool = False,
) -> Iterator[Samples]:
    """Find the samples of a shard from one on, around what is not wanted.

    Args:
        window: The shard.
        wanted: The samples whose bytes will be asked for; by default none.
        start: Number of the sample to begin with, and where its first header is.
        joined: As of `HeaderReader`.

    Raises:
        SourceError: If it is no tar file, damaged, or a sample has two members of one extension.
    """
    first, offset = start
    walk, extensions = MemberWalk(window, offset, joined=joined), Extensions()
    links = Links(window.file, joined=joined)
    # The last sample of a window may go on in the next: its members wait for it here.
    waiting, kept = no_members(), list[memoryview]()
    window.pace(HEADER_BYTES if wanted is None else window.skip_piece_bytes(wanted.mean_bytes))
    while not walk.ended:
        following = -1 if wanted is None else wanted.first_from(first)
        if wanted is not None and following == first:
            window.pace(wanted.ahead_bytes(first))
        found = walk.take(following - first if following > first else MEMBERS_AT_ONCE)
        if following != first and len(found):
            piece_bytes = window.skip_piece_bytes(found.bytes_per_request())
            # Where small members are only counted, nobody else reads what comes next.
            whole = wanted is None and piece_bytes >= MANY_BYTES
            window.pace(READ_BYTES if whole else piece_bytes)
        members = join(waiting, found)
        if not len(members):
            continue
        samples = _grouped(members, first, extensions, links, walk=walk, window=window, kept=kept)
        last = samples.stop if walk.ended else samples.stop - 1
        if wanted is not None and following == first:
            # Views of these members may read on: no further than is wanted behind them.
            window.pace(wanted.ahead_bytes(last))
        cut = int(np.searchsorted(samples.number, last))
        waiting, kept = members.part(slice(cut, None)), _keep(samples, cut, wanted)
        first = last
        if cut:
            yield samples.until(cut)


def _grouped(
    members: Members,
    first: int,
    extensions: Extensions,
    links: Links,
    *,
    walk: MemberWalk,
    window: FileWindow,
    kept: list[memoryview],
) -> Samples:
    names = members.names()
    ends = (members.key_bytes + 1).tolist()
    codes = [extensions[name[end:]] for name, end in zip(names, ends, strict=True)]
    number, code = first + _numbers(members), np.array(codes, np.int64)
    samples = Samples(
        members, names, number, code, extensions, links, window, walk.held, walk.held_from, kept
    )
    pairs = np.sort(number * len(extensions.codes) + code)
    twice = pairs[1:][pairs[1:] == pairs[:-1]]
    if len(twice):
        at, which = divmod(int(twice[0]), len(extensions.codes))
        raise duplicate_member(window.file.path, samples.key(at), list(extensions.codes)[which])
    return samples


def _numbers(members: Members) -> NDArray[np.int64]:
    """Number the samples: members that follow one another under one key are one."""
    name, key_bytes = members.name, members.key_bytes
    differs = name[1:] != name[:-1]
    agree = np.where(differs.any(axis=1), differs.argmax(axis=1), name.shape[1])
    begins = (key_bytes[1:] != key_bytes[:-1]) | (agree < key_bytes[1:])
    return np.concatenate([[0], np.cumsum(begins)])


def _keep(samples: Samples, cut: int, wanted: Wanted | None) -> list[memoryview]:
    """View now what the next window will not show: the bytes of the members that wait."""
    kept = [memoryview(b"")] * (len(samples.number) - cut)
    if wanted is None or not kept or wanted.first_from(samples.stop - 1) != samples.stop - 1:
        return kept
    codes = {code for name, code in samples.extensions.codes.items() if name in wanted.extensions}
    waiting = enumerate(samples.code[cut:].tolist(), start=cut)
    chosen = np.array([member for member, code in waiting if code in codes], np.int64)
    for member, view in zip(chosen.tolist(), samples.payloads(chosen), strict=True):
        kept[member - cut] = view
    return kept


def duplicate_member(path: str, key: str, extension: str) -> SourceError:
    """Say that a sample has two members of one extension."""
    return SourceError(
        f"{path}: sample {key!r} has two members {extension!r}, expected one; write the shard "
        "again with names that differ before their first dot"
    )
