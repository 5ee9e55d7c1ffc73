"""Who trains a cell: a claim on the cell's file in `claims`, see `dataio.base.claim`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dataio.base import claim as claims
from dataio.base.claim import Claimant, NoLocksError
from tonari.ablate.study import Cell
from tonari.errors import CommandError

CLAIMS = "claims"


@contextlib.contextmanager
def claim(out: Path, cell: Cell) -> Iterator[bool]:
    """Try to be the only one who trains a cell; see `dataio.base.claim.claim`.

    Raises:
        CommandError: If the filesystem has no locks.
    """
    path = _path(out, cell)
    with contextlib.ExitStack() as stack:
        try:
            taken = stack.enter_context(claims.claim(path))
        except NoLocksError as error:
            raise CommandError(
                f"{path}: cannot be locked ({error.strerror}), expected a filesystem with locks: "
                f"without, processes would train the same cells; name another --out, or have it "
                f"mounted with locks (Lustre: -o flock)"
            ) from error
        yield taken


def claimant(out: Path, cell: Cell) -> Claimant | None:
    """Say which other process trains a cell; None if none does."""
    return claims.claimant(_path(out, cell))


def _path(out: Path, cell: Cell) -> Path:
    return out / CLAIMS / cell.file_name
