"""Files of JSON lines that are appended to, each line with its own checksum.

What a kill or a full disk cut off is no line, nor are zeros, as a power cut leaves them; what has
changed since it was written is damage.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dataio.base.errors import DamagedFileError
from dataio.base.seeding import digest

WHOLE = re.compile(rb'"checksum": ".{18,19}$|checksum.{4}[0-9a-f]{16}"}$', re.DOTALL)
"""Matches the end of a line that was written to its end, though some byte of it has changed."""


def checked_line(line: Mapping[str, object]) -> str:
    """Write an object as a line of JSON with its checksum, without the line's end."""
    return json.dumps({**line, "checksum": digest(json.dumps(line, sort_keys=True))})


def read_checked_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the whole lines of a file, without their checksums.

    Raises:
        DamagedFileError: If a line is damaged.
        OSError: If the file cannot be read.
    """
    for number, text in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            line = parse_checked_line(text)
        except ValueError as error:
            raise DamagedFileError(f"{path}: line {number} {error}") from error
        if line is not None:
            yield line


def parse_checked_line(text: bytes) -> dict[str, Any] | None:
    """Read a line, without its checksum; None if it is the beginning of one, or blank.

    Raises:
        ValueError: If it is damaged; it says how.
    """
    if not text.strip(b"\0 \r"):
        return None
    try:
        line = dict(json.loads(text))
        checksum = line.pop("checksum")
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ValueError) and text.startswith(b"{") and not WHOLE.search(text):
            return None
        raise ValueError(f"cannot be read ({error})") from error
    if checksum != digest(json.dumps(line, sort_keys=True)):
        raise ValueError("does not match its checksum")
    return line
