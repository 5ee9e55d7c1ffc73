"""Where the members of a tar file lie. Members are never opened, let alone unpickled."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from dataio.base.errors import SourceError
from dataio.source.io.window import Window

BLOCK = 512
REGULAR = (b"0", b"\0", b"7")
WITHOUT_PAYLOAD = (b"1", b"2", b"3", b"4", b"5", b"6")
EXTENSIONS = (b"L", b"K", b"x", b"X", b"g")
EMPTY_BLOCK = bytes(BLOCK)
GZIP_START = b"\x1f\x8b"
SAMPLE_NAME = re.compile(rb"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
META_NAME = re.compile(rb"__[^/]*__(?:$|/)")


class Member(NamedTuple):
    """A file of a sample, inside a tar file: ``name[:key_bytes]`` is the sample's key."""

    name: bytes
    key_bytes: int
    offset: int
    num_bytes: int


@dataclass
class _Extended:
    """What an extension header says about the member that follows, or a global one about all."""

    name: bytes | None = None
    num_bytes: int | None = None


def key_length(name: bytes) -> int:
    """Find where WebDataset cuts a member's name into key and extension; 0 if it is of no sample.

    The key is the name up to the first dot of its last part. Hidden files are of no sample, in
    directories too, where WebDataset makes nameless samples.
    """
    match = SAMPLE_NAME.fullmatch(name)
    return 0 if match is None or META_NAME.match(name) else match.end(1)


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member's name into key and extension, in lower case; None if it is of no sample."""
    raw = name.encode(errors="surrogateescape")
    key_bytes = key_length(raw)
    return (as_text(raw[:key_bytes]), as_extension(raw[key_bytes + 1 :])) if key_bytes else None


def as_text(name: bytes) -> str:
    """Decode a name or a part of one; bytes that are no UTF-8 survive."""
    return name.decode(errors="surrogateescape")


def as_extension(name: bytes) -> str:
    """Decode what follows the key's dot; upper and lower case are one."""
    return as_text(name).lower()


class HeaderReader:
    """Reads a tar file header by header, from wherever the last one led to.

    Args:
        window: The file.
        offset: Where the first header begins.

    Attributes:
        offset: Where the next header begins.
        ended: Whether there is none.
    """

    def __init__(self, window: Window, offset: int = 0) -> None:
        self.offset = offset
        self.ended = False
        self._window = window
        self._here, self._everywhere = _Extended(), _Extended()

    @property
    def is_plain(self) -> bool:
        """Whether no extension header has a say in what follows."""
        return self._here == self._everywhere == _Extended()

    @property
    def under_global(self) -> bool:
        """Whether a global header has a say in all that follows."""
        return self._everywhere != _Extended()

    def step(self) -> tuple[Member, ...]:
        """Read one header: the member, if it is of a sample.

        Raises:
            SourceError: If it is not a tar file, damaged, or ends inside a member.
        """
        window, offset = self._window, self.offset
        block = _next_header(window, offset)
        self.ended = not block
        if self.ended:
            return ()
        kind, num_bytes = block[156:157], read_number(block[124:136])
        start, found = offset + BLOCK, tuple[Member, ...]()
        if kind in EXTENSIONS:
            into = self._everywhere if kind == b"g" else self._here
            _extend(window, start, num_bytes, kind=kind, into=into)
        else:
            name = self._here.name or self._everywhere.name or _name(block)
            for extended in (self._everywhere, self._here):
                num_bytes = num_bytes if extended.num_bytes is None else extended.num_bytes
            num_bytes = 0 if kind in WITHOUT_PAYLOAD else num_bytes
            _check_member(window, offset, kind=kind, name=name, num_bytes=num_bytes)
            self._here = _Extended()
            if kind in REGULAR and (key_bytes := key_length(name)):
                found = (Member(name, key_bytes, start, num_bytes),)
        self.offset = start + (num_bytes + BLOCK - 1) // BLOCK * BLOCK
        return found


def read_number(field: bytes) -> int:
    """Read a header's number: octal digits, or base 256 if the first bit is set; -1 if neither."""
    if field[0] & 0x80:
        return int.from_bytes(field, "big") - (0x80 << 8 * (len(field) - 1))
    try:
        return int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        return -1


def _next_header(window: Window, offset: int) -> bytes:
    """Read and check the header at ``offset``; b"" at the end of the archive."""
    block = bytes(window.view(offset, BLOCK))
    # Writers may leave out the two empty blocks at the end, but not everything.
    if (0 < offset < window.file.size + BLOCK and not block) or block == EMPTY_BLOCK:
        return b""
    stored = read_number(block[148:156]) if len(block) == BLOCK else -1
    if stored in _header_sums(block) and read_number(block[124:136]) >= 0:
        return block
    if offset:
        _refuse(window, offset, "no header", "one or the end; the shard is truncated or damaged")
    hint = " (compressed: decompress it)" if block.startswith(GZIP_START) else ""
    _refuse(window, 0, f"{block[:8]!r}{hint}", "a tar header; it is not a tar file")


def _header_sums(block: bytes) -> tuple[int, int]:
    """Sum a header's bytes, the sum itself as spaces: unsigned, and signed as old writers did."""
    unsigned = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    high = 0 if block.isascii() else sum(byte > 127 for byte in block)
    return unsigned, unsigned - 256 * high


def _name(block: bytes) -> bytes:
    name = block[:100].split(b"\0", 1)[0]
    # GNU tar keeps times where POSIX keeps the directory.
    if block[345] and block[257:263] == b"ustar\0":
        return block[345:500].split(b"\0", 1)[0] + b"/" + name
    return name


def _check_member(window: Window, offset: int, *, kind: bytes, name: bytes, num_bytes: int) -> None:
    shown, size = repr(name.decode(errors="replace")), window.file.size
    if kind == b"S":
        _refuse(window, offset, f"the sparse member {shown}", "plain ones, without --sparse")
    if not 0 <= num_bytes <= size - offset - BLOCK:
        found = f"member {shown} of {num_bytes} bytes, beyond the end of the file ({size})"
        _refuse(window, offset, found, "it whole; the shard is truncated")


def _extend(window: Window, start: int, num_bytes: int, *, kind: bytes, into: _Extended) -> None:
    """Read an extension header's payload: a long name, a long link, or pax records."""
    payload = bytes(window.view(start, num_bytes))
    if len(payload) < num_bytes:
        _refuse(window, start, "the end of the file", "a long name; the shard is truncated")
    if kind == b"L":
        into.name = payload.split(b"\0", 1)[0]
    elif kind != b"K":
        try:
            records = dict(_pax_records(payload))
            into.name = records.get(b"path", into.name)
            into.num_bytes = int(records[b"size"]) if b"size" in records else into.num_bytes
        except (ValueError, IndexError) as error:
            _refuse(window, start, f"an extended header that is none ({error})", "pax records")
        if any(keyword.startswith(b"GNU.sparse") for keyword in records):
            _refuse(window, start, "a sparse member", "plain ones, without --sparse")


def _pax_records(payload: bytes) -> Iterator[tuple[bytes, bytes]]:
    while payload and payload[0]:
        length = int(payload.split(b" ", 1)[0])
        keyword, _, value = payload[:length].split(b" ", 1)[1][:-1].partition(b"=")
        yield keyword, value
        payload = payload[length:]


def _refuse(window: Window, offset: int, found: str, expected: str) -> NoReturn:
    raise SourceError(
        f"{window.file.path}: found {found} at byte {offset}, expected {expected}; check the "
        "pattern, copy the shard again, or write it again with `tonari pack`"
    )
