"""Where the members of a tar file lie. Members are never opened, let alone unpickled."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from dataio.base.errors import SourceError
from dataio.source.storage.compressed import HEAD_BYTES, codec_of
from dataio.source.storage.window import File, FileWindow

BLOCK = 512
REGULAR = (b"0", b"\0", b"7")
HARD_LINK = b"1"
LINKS = (HARD_LINK, b"2")
WITHOUT_PAYLOAD = (*LINKS, b"3", b"4", b"5", b"6")
OF_NO_SAMPLE = (b"5", b"D", b"V")
"""Directories, lists of what they hold, and labels of volumes, whatever they are named."""
EXTENSIONS = (b"L", b"K", b"x", b"X", b"g")
OF_ONE_MEMBER = frozenset((b"path", b"size", b"linkpath"))
"""What pax records say of a member: no global header may."""
LINKED = -1
"""In place of its length, of a member whose bytes are those of another."""
END_BYTES = 2 * BLOCK
"""Zeros that mark the end of an archive."""
MOST_END_BYTES = END_BYTES + 19 * BLOCK
"""With those that fill a record of 10,240 bytes, as writers do."""
MOST_EXTENDED_BYTES = 1 << 20
"""Of a long name or of pax records."""
ZEROS_AT_ONCE, MOST_ZEROS = 1 << 20, 64 << 20
"""How zeros are passed over; and how many are counted for a message."""
SAMPLE_NAME = re.compile(rb"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
META_NAME = re.compile(rb"__[^/]*__(?:$|/)")
CURE = "check the pattern, copy the shard again, or write it again with `tonari pack`"
JOINED = "open it with dataio.Shards(..., joined=True), or data.joined = true of `tonari train`"


class Member(NamedTuple):
    """A file of a sample, inside a tar file: ``name[:key_bytes]`` is the sample's key.

    Of a link ``num_bytes`` is `LINKED`, and `Links` finds its bytes by ``offset``.
    """

    name: bytes
    key_bytes: int
    offset: int
    num_bytes: int


class TarEntry(NamedTuple):
    """A file, link, directory or the like: its kind, and what a link leads to."""

    kind: bytes
    name: bytes
    link: bytes
    offset: int
    num_bytes: int


@dataclass
class _Extended:
    """What extension headers say about the member that follows."""

    name: bytes | None = None
    link: bytes | None = None
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

    The file is one archive: behind its members come an end marker of two zero blocks, no more
    zeros than fill a record, and the end of the file.

    Args:
        window: The file.
        offset: Where the first header begins.
        joined: Whether the end of the file alone ends it: zeros are passed over, and may lack.

    Attributes:
        offset: Where the next header begins.
        ended: Whether there is none.
        archive: Number of the archive, of several that are joined.
    """

    def __init__(self, window: FileWindow, offset: int = 0, *, joined: bool = False) -> None:
        self.offset = offset
        self.ended = False
        self.archive = 0
        self._window = window
        self._joined = joined
        self._said = _Extended()

    @property
    def is_plain(self) -> bool:
        """Whether no extension header has a say in what follows."""
        return self._said == _Extended()

    def step(self) -> tuple[Member, ...]:
        """Read one header: the member, if it is of a sample.

        Raises:
            SourceError: If it is not a tar file, damaged, or ends inside a member; or if there is
                anything but one archive.
        """
        entry = self.entry()
        key_bytes = 0 if entry is None else key_length(entry.name)
        if entry is None or not key_bytes or entry.kind in OF_NO_SAMPLE:
            return ()
        if entry.kind not in (*REGULAR, *LINKS):
            found = f"member {as_shown(entry.name)} of kind {entry.kind.decode(errors='replace')!r}"
            refuse(self._window.file, entry.offset - BLOCK, found, "files and links to them")
        num_bytes = LINKED if entry.kind in LINKS else entry.num_bytes
        return (Member(entry.name, key_bytes, entry.offset, num_bytes),)

    def entry(self) -> TarEntry | None:
        """Read one header; None if it only says something about the next, or there is none.

        Raises:
            SourceError: As `step`.
        """
        block = self._header()
        if self.ended:
            return None
        window, said, kind = self._window, self._said, block[156:157]
        start, num_bytes = self.offset + BLOCK, read_number(block[124:136])
        found = None
        if kind in EXTENSIONS:
            _extend(window, start, num_bytes, kind=kind, into=said)
        else:
            name = said.name or _name(block)
            num_bytes = num_bytes if said.num_bytes is None else said.num_bytes
            num_bytes = 0 if kind in WITHOUT_PAYLOAD else num_bytes
            _check_member(window.file, self.offset, kind=kind, name=name, num_bytes=num_bytes)
            link = said.link or block[157:257].split(b"\0", 1)[0]
            found = TarEntry(kind, name, link, start, num_bytes)
            self._said = _Extended()
        self.offset = start + (num_bytes + BLOCK - 1) // BLOCK * BLOCK
        return found

    def _header(self) -> bytes:
        """Read and check the next header; b"" at the end."""
        window = self._window
        block = bytes(window.view(self.offset, BLOCK))
        if not block.strip(b"\0") and (block or self.offset):
            if not self.is_plain:
                expected = "the member that the extended header before names; it is missing"
                refuse(window.file, self.offset, "the end" if block else "the file's end", expected)
            if self._joined:
                passed = _end_of_zeros(window, self.offset) - self.offset
                self.offset += passed // BLOCK * BLOCK
                self.archive += 1
                block = bytes(window.view(self.offset, BLOCK))
                self.ended = not block and self.offset < window.file.size + BLOCK
            else:
                _check_end(window, self.offset)
                self.ended = True
        if self.ended:
            return b""
        stored = read_number(block[148:156]) if len(block) == BLOCK else -1
        if stored not in _header_sums(block) or read_number(block[124:136]) < 0:
            _refuse_header(window.file, self.offset, block)
        return block


def read_number(field: bytes) -> int:
    """Read a header's number: octal digits, or base 256 if the first bit is set; -1 if neither."""
    if field[0] & 0x80:
        return int.from_bytes(field, "big") - (0x80 << 8 * (len(field) - 1))
    try:
        return int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        return -1


def as_shown(name: bytes) -> str:
    """Write a name for a message."""
    return repr(name.decode(errors="replace"))


def is_end_marker(end: memoryview) -> bool:
    """Whether the last bytes of a shard are the zeros that writers leave."""
    return END_BYTES <= len(end) <= MOST_END_BYTES and not bytes(end).strip(b"\0")


def _check_end(window: FileWindow, offset: int) -> None:
    """Refuse anything from an end marker on but the zeros that writers leave."""
    if is_end_marker(window.view(offset, MOST_END_BYTES + 1)):
        return
    stop = _end_of_zeros(window, offset, most=MOST_ZEROS)
    num_zeros, behind = stop - offset, bytes(window.view(stop, 1))
    expected = f"{END_BYTES} to {MOST_END_BYTES} zeros that end the file"
    if behind.strip(b"\0"):
        found = f"zeros up to byte {stop}, and more behind them"
        cure = "headers may be zeroed: copy the shard again; or, if archives were joined, "
    elif num_zeros < END_BYTES:
        found = f"{num_zeros} zeros" if num_zeros else "the end of the file"
        cure = "the shard is truncated: copy it again; or, if its writer leaves them out, "
    else:
        found = f"{num_zeros} zeros{' and more' if behind else ''}"
        cure = "data may be missing, as of a download that broke off: copy the shard again; or, "
        cure += "if it is meant so, "
    refuse(window.file, offset, found, expected, cure + JOINED)


def _end_of_zeros(window: FileWindow, offset: int, most: int | None = None) -> int:
    """Find the first byte from ``offset`` on that is not 0, or the end; or give up behind some."""
    at = offset
    while most is None or at - offset < most:
        piece = bytes(window.view(at, ZEROS_AT_ONCE))
        rest = piece.lstrip(b"\0")
        at += len(piece) - len(rest)
        if rest or not piece:
            break
    return at


def _refuse_header(file: File, offset: int, block: bytes) -> NoReturn:
    if offset:
        refuse(file, offset, "no header", "one or the end; the shard is truncated or damaged")
    if codec := codec_of(block[:HEAD_BYTES]):
        cure = "decompress it, or compress it with gzip"
        cure = "give its name the end .tar.gz" if codec == "gzip" else cure
        refuse(file, 0, f"{block[:8]!r}, as {codec} begins", "a tar header; it is compressed", cure)
    refuse(file, 0, f"{block[:8]!r}", "a tar header; it is not a tar file")


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


def _check_member(file: File, offset: int, *, kind: bytes, name: bytes, num_bytes: int) -> None:
    shown, size = as_shown(name), file.size
    if kind == b"S":
        refuse(file, offset, f"the sparse member {shown}", "plain ones, without --sparse")
    if not 0 <= num_bytes <= size - offset - BLOCK:
        found = f"member {shown} of {num_bytes} bytes, beyond the end of the file ({size})"
        refuse(file, offset, found, "it whole; the shard is truncated")
    if num_bytes > file.most_bytes:
        found = f"member {shown} of {num_bytes} bytes in a compressed shard"
        cure = "decompress the shard first if it is meant to hold that"
        refuse(file, offset, found, f"at most {file.most_bytes} in one so small", cure)


def _extend(
    window: FileWindow, start: int, num_bytes: int, *, kind: bytes, into: _Extended
) -> None:
    """Read an extension header's payload: a long name, a long link, or pax records."""
    file = window.file
    if num_bytes > MOST_EXTENDED_BYTES:
        expected = f"at most {MOST_EXTENDED_BYTES}; the shard is damaged"
        refuse(file, start, f"a long name of {num_bytes} bytes", expected)
    payload = bytes(window.view(start, num_bytes))
    if len(payload) < num_bytes:
        refuse(file, start, "the end of the file", "a long name; the shard is truncated")
    if kind == b"L":
        into.name = payload.split(b"\0", 1)[0]
    elif kind == b"K":
        into.link = payload.split(b"\0", 1)[0]
    else:
        try:
            records = dict(_pax_records(payload))
            num_bytes_said = int(records.get(b"size", -1))
        except (ValueError, IndexError) as error:
            refuse(file, start, f"an extended header that is none ({error})", "pax records")
        if any(keyword.startswith(b"GNU.sparse") for keyword in records):
            refuse(file, start, "a sparse member", "plain ones, without --sparse")
        if kind != b"g":
            into.name = records.get(b"path", into.name)
            into.link = records.get(b"linkpath", into.link)
            into.num_bytes = num_bytes_said if b"size" in records else into.num_bytes
        elif OF_ONE_MEMBER & records.keys():
            said = b", ".join(sorted(OF_ONE_MEMBER & records.keys())).decode()
            refuse(file, start, f"a global header with {said}", "that for each member alone")


def _pax_records(payload: bytes) -> Iterator[tuple[bytes, bytes]]:
    while payload and payload[0]:
        length = int(payload.split(b" ", 1)[0])
        keyword, _, value = payload[:length].split(b" ", 1)[1][:-1].partition(b"=")
        yield keyword, value
        payload = payload[length:]


def refuse(file: File, offset: int, found: str, expected: str, cure: str = CURE) -> NoReturn:
    """Describe what a tar shard should not have."""
    raise SourceError(f"{file.path}: found {found} at byte {offset}, expected {expected}; {cure}")
