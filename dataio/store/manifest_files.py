"""The files that say what a cache holds, and where: `meta.json`, `manifest.json` and its tables."""

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dataio.base.atomic import read_record, write_record, write_table
from dataio.base.errors import CacheError, DamagedFileError
from dataio.base.filesystem import readable
from dataio.rows.rows import RowSchema
from dataio.store.files.manifest import Entries, to_table
from dataio.store.state import FORMAT_VERSION, Head


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


class ManifestFiles:
    """Reads and writes a cache's manifest and tables, and counts what is written.

    Args:
        directory: The cache.
        guard: Held while bytes are counted: threads do that beside one another.

    Attributes:
        directory: The cache.
        path: `manifest.json`.
        bytes_written: Of rows and manifests, by this process.
    """

    def __init__(self, directory: Path, guard: threading.RLock) -> None:
        self.directory = directory
        self.path = directory / "manifest.json"
        self.bytes_written = 0
        self._guard = guard

    def names(self) -> list[str]:
        """Name the files of the directory."""
        return sorted(path.name for path in self.directory.iterdir())

    def unlink(self, names: Sequence[str]) -> None:
        """Remove files; none of them need be there."""
        for name in names:
            (self.directory / name).unlink(missing_ok=True)

    def read_head(self) -> Head | None:
        """Read `manifest.json`; None where nothing was ever committed.

        Raises:
            CacheError: If it is damaged.
        """
        with readable(self.directory, "the manifest"):
            try:
                return Head.from_record(read_record(self.path))
            except FileNotFoundError:
                return None

    def holds_rows(self) -> bool:
        """Whether the manifest on disk names any row."""
        head = self.read_head()
        return head is not None and head.missing < head.rows

    def write_head(self, head: Head) -> None:
        """Replace `manifest.json`."""
        write_record(self.path, head.to_record())
        self.count_written(self.path.stat().st_size)

    def write_table(self, name: str, entries: Entries, *, sync_name: bool = True) -> None:
        """Write entries into a file of the cache."""
        write_table(self.directory / name, to_table(entries), sync_name=sync_name)
        self.count_written((self.directory / name).stat().st_size)

    def count_written(self, num_bytes: int) -> None:
        """Add to `bytes_written`."""
        with self._guard:
            self.bytes_written += num_bytes
