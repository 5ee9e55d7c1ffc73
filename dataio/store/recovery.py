"""Bring a cache's directory from any state that a kill can leave to one that says what it holds."""

import logging
from pathlib import Path

import numpy as np

from dataio.base.errors import DamagedCacheError
from dataio.store.commit_log import CommitLog
from dataio.store.files.manifest import Entries, join_entries
from dataio.store.files.row_files import RowFiles
from dataio.store.state import Verdict, judge

log = logging.getLogger(__name__)

PROVED_ROWS = 4096


def check_files(directory: Path, files: RowFiles, verdict: Verdict, *, holds_rows: bool) -> None:
    """Look whether every file that the manifest needs is there.

    Raises:
        DamagedCacheError: If one is not.
    """
    lost = [path.name for file in files.by_position if not (path := file.path).exists()]
    if verdict.absent or (lost and holds_rows):
        missing = ", ".join([*verdict.absent, *lost])
        raise DamagedCacheError(f"{directory}: {missing} are no longer there")


def prove_rows(
    files: RowFiles, error: DamagedCacheError, *, num_variable: int
) -> tuple[Entries, str]:
    """Find the rows that prove themselves, where the manifest does not say. Reads all rows.

    Returns:
        The rows, in slots from 0 on, and what was found, for a message.
    """
    files.reserve(0)
    files.map(writable=False)
    found = find_rows(files, num_variable)
    message = (
        f"{error}; {len(found)} rows prove themselves and stay, the others are read from other "
        "nodes or from the source"
    )
    log.warning("made the manifest anew: %s", message)
    return found, message


def find_rows(files: RowFiles, num_variable: int) -> Entries:
    """Read every header, and keep what its row's bytes prove. Reads all rows.

    A sample has the same bytes whenever it was written, so a row of any epoch is as good as the
    newest.

    Args:
        files: Mapped.
        num_variable: Variable fields.

    Returns:
        Entries of distinct samples, in slots from 0 on.
    """
    parts = []
    for first in range(0, files.num_positions, PROVED_ROWS):
        found = files.read_headers(slice(first, min(first + PROVED_ROWS, files.num_positions)))
        parts.append(found.take(files.prove(found)))
    found = join_entries(parts, num_variable)
    _, firsts = np.unique(found.sample_id[:], return_index=True)
    found = found.take(np.sort(firsts))
    found.slot.put(np.arange(len(found)), np.arange(len(found)))
    return found


def remove_litter(commits: CommitLog, files: RowFiles) -> None:
    """Mend the headers of arrays, and remove what the manifest leaves without meaning."""
    for file in files.by_position:
        file.mend_header()
    commits.tables.unlink(judge(commits.tables.names(), commits.tables.read_head()).litter)
