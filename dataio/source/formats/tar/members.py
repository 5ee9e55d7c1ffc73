"""The members of a tar file in columns, many at a time."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.source.formats.tar.blocks import BLOCK, Headers, plain_headers
from dataio.source.formats.tar.headers import META_NAME, HeaderReader, Member
from dataio.source.storage.window import HEADER_BYTES, MANY_BYTES, FileWindow

MEMBERS_AT_ONCE = 512
RECENT_MEMBERS = 8
"""By so many it is chosen whether to read around the members that follow."""


@dataclass(frozen=True)
class Members:
    """Members of samples, in their order.

    Attributes:
        name: uint8[n, width]: Names, filled up with zeros.
        key_bytes: int64[n]: Length of the sample's key, which the name begins with.
        offset: int64[n]: Where the bytes begin in the shard.
        num_bytes: int64[n]: How many there are; `LINKED` of a link, whose bytes lie elsewhere.
    """

    name: NDArray[np.uint8]
    key_bytes: NDArray[np.int64]
    offset: NDArray[np.int64]
    num_bytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.key_bytes)

    def part(self, chosen: slice | NDArray[np.bool_]) -> "Members":
        """Choose some."""
        return Members(
            self.name[chosen], self.key_bytes[chosen], self.offset[chosen], self.num_bytes[chosen]
        )

    def extents(self) -> list[tuple[int, int]]:
        """(offset, num_bytes) of each."""
        return list(zip(self.offset.tolist(), self.num_bytes.tolist(), strict=True))

    def bytes_per_request(self) -> int:
        """Mean bytes that one request for a header passes over: small members come with another."""
        small = self.num_bytes < HEADER_BYTES
        small_bytes = int(self.num_bytes[small].sum())
        num_requests = int(np.count_nonzero(~small)) + small_bytes // HEADER_BYTES
        return int(self.num_bytes.sum()) // max(num_requests, 1)

    def names(self) -> list[bytes]:
        """The names as bytes."""
        name = np.ascontiguousarray(self.name)
        return list(name.view(f"S{name.shape[1]}")[:, 0].tolist())


def no_members() -> Members:
    """Make an empty list of members."""
    return _columns([])


class MemberWalk:
    """Lists the members of samples of a tar file to its end.

    Args:
        window: The file. Reads around members where little is read at once.
        offset: Where the first header begins.
        joined: As of `HeaderReader`.

    Attributes:
        held: Bytes of the file, in which most of the members listed last lie.
        held_from: Where these begin.
    """

    def __init__(self, window: FileWindow, offset: int = 0, *, joined: bool = False) -> None:
        self.held = memoryview(b"")
        self.held_from = 0
        self._window = window
        self._reader = HeaderReader(window, offset, joined=joined)

    @property
    def ended(self) -> bool:
        """Whether all members were listed."""
        return self._reader.ended

    def take(self, most: int = MEMBERS_AT_ONCE) -> Members:
        """List the members that come next: those of a window, or a few where little is read.

        Args:
            most: How many, at most, where little is read at once.

        Raises:
            SourceError: If it is not a tar file, damaged, or ends inside a member.
        """
        reader, window = self._reader, self._window
        self.held_from, self.held = reader.offset, window.rest(reader.offset, least=BLOCK)
        if window.piece_bytes < MANY_BYTES or not len(self.held):
            return self._few(most)
        stop, plain = self.held_from + len(self.held), no_members()
        if reader.is_plain:
            limit = window.file.size - reader.offset
            found = plain_headers(self.held, limit=limit, most_bytes=window.file.most_bytes)
            plain = _split(found, reader.offset)
            reader.offset += found.end
        # The rest of the window, so that where nothing is plain it is not tried at every header.
        others: list[Member] = []
        # A header that goes on behind it waits for the next, unless the file ends there.
        last = stop - BLOCK if len(self.held) >= BLOCK else stop
        while not reader.ended and reader.offset <= last:
            others += reader.step()
        return join(plain, _columns(others))

    def _few(self, most: int) -> Members:
        members: list[Member] = []
        while not self._reader.ended and len(members) < most:
            for member in self._reader.step():
                members.append(member)
                # By the largest of the last: small ones often stand beside a large one.
                largest = max(recent.num_bytes for recent in members[-RECENT_MEMBERS:])
                self._window.pace(self._window.skip_piece_bytes(largest))
        return _columns(members)


def join(first: Members, second: Members) -> Members:
    """Put members behind others."""
    if not len(first) or not len(second):
        return first if len(first) else second
    width = max(first.name.shape[1], second.name.shape[1])
    names = [
        part.name
        if part.name.shape[1] == width
        else np.pad(part.name, ((0, 0), (0, width - part.name.shape[1])))
        for part in (first, second)
    ]
    return Members(
        np.concatenate(names),
        np.concatenate([first.key_bytes, second.key_bytes]),
        np.concatenate([first.offset, second.offset]),
        np.concatenate([first.num_bytes, second.num_bytes]),
    )


def _columns(members: list[Member]) -> Members:
    names = np.array([member.name for member in members] or [b"?"], np.bytes_)
    width = names.dtype.itemsize
    numbers = np.array([member[1:] for member in members], np.int64).reshape(-1, 3)
    name = names.view(np.uint8).reshape(-1, width)[: len(members)]
    return Members(name, numbers[:, 0], numbers[:, 1], numbers[:, 2])


def _split(found: Headers, begin: int) -> Members:
    """Cut all names into key and extension, by the rule of `key_length`."""
    name = found.name
    slash, dot = name == ord("/"), name == ord(".")
    # int64[n]: where the last part begins
    base = np.where(slash.any(axis=1), name.shape[1] - slash[:, ::-1].argmax(axis=1), 0)
    dot &= np.arange(name.shape[1]) >= base[:, None]
    key_bytes = dot.argmax(axis=1)
    good = key_bytes > base
    for row in np.flatnonzero(good & (name[:, :2] == ord("_")).all(axis=1)):
        good[row] = META_NAME.match(name[row].tobytes()) is None
    members = Members(name, key_bytes, begin + found.offset, found.num_bytes)
    return members if good.all() else members.part(good)
