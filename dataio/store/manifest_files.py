"""The files that say which rows lie where: `manifest.json` and the tables that it names."""

import threading
from collections.abc import Sequence
from pathlib import Path

from dataio.base.atomic import read_record, write_record, write_table
from dataio.store.disk_errors import readable
from dataio.store.files.manifest import Entries, to_table
from dataio.store.state import Head


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
