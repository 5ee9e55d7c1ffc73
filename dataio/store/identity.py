"""What a cache holds, as its `meta.json` says."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dataio.base.atomic import read_record
from dataio.base.errors import CacheError, DamagedFileError
from dataio.rows.rows import RowSchema
from dataio.store.state import FORMAT_VERSION


@dataclass(frozen=True)
class Identity:
    """What a cache holds: refused when it is anything else.

    Attributes:
        source: The pattern as it was given, for messages.
        fingerprint: Of the source's content.
        schema: Stored form of the fields.
        fields: What they are read from, and as what; see `declarations`.
        prefixes: Fingerprints that the source had when it was shorter, of one that grows: what was
            begun for these is this source's too.
    """

    source: str
    fingerprint: str
    schema: RowSchema
    fields: Mapping[str, Mapping[str, object]]
    prefixes: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, object]:
        """What `meta.json` keeps."""
        stored = asdict(self)
        del stored["prefixes"]
        return {"format": FORMAT_VERSION, **json.loads(json.dumps(stored))}


def read_meta(directory: Path) -> dict[str, Any]:
    """Read what a cache's `meta.json` says it holds, see `Identity.to_json`.

    Raises:
        CacheError: If it is damaged, or of another format.
        OSError: If it cannot be read.
    """
    path = directory / "meta.json"
    try:
        return read_record(path)
    except DamagedFileError as error:
        with contextlib.suppress(ValueError, AttributeError):
            found = json.loads(path.read_bytes())
            # Older ones have no checksum.
            if "checksum" not in found and found.get("format") != FORMAT_VERSION:
                raise CacheError(
                    f"{path}: cache format {found.get('format')}, this version reads "
                    f"{FORMAT_VERSION}; remove {directory}, and the next run stages again"
                ) from None
        raise CacheError(
            f"{error}; what the cache holds is not known: remove {directory}, and the next run "
            "stages it again"
        ) from error
