"""Array files that are opened without a declaration, as each array has one row a sample."""

from collections.abc import Sequence

from dataio.base.errors import SourceError
from dataio.source.formats.grids.array_files import ArrayFiles
from dataio.source.formats.grids.numbering import describe
from dataio.source.formats.grids.source import ArrayFilesSource, FoundFile
from dataio.source.storage.files import Storage
from dataio.world import World


def open_rows(names: Sequence[str], *, world: World, storage: Storage) -> ArrayFilesSource:
    """Open array files whose first axis can only be that of the samples. Collective.

    Args:
        names: As `ArrayFiles` takes them.
        world: The ranks that open them.
        storage: Reads.

    Raises:
        SourceError: On every rank, if the arrays of a file differ in their first axis, or several
            files hold one array each without a name: these may be samples as well as rows.
    """
    declared: str | list[str] = names[0] if len(names) == 1 else list(names)
    source = ArrayFiles(declared).open(world, storage=storage)
    for file in source.files:
        if not _has_rows(file) or (file.kind == "npy" and len(source.files) > 1):
            raise SourceError(
                f"{file.path}: holds {describe(file.variables)}, of {len(source.files)} files, "
                "expected arrays that all have one row a sample, so that nothing is to be "
                f"declared; say what a sample is: dataio.ArrayFiles({declared!r}, axis=0) for rows "
                'of those arrays that fields name (or axis="time"), axis=None for whole files; see '
                "docs/grids.md"
            )
    return source


def _has_rows(file: FoundFile) -> bool:
    firsts = {(v.dims[:1], v.shape[:1]) for v in file.variables.values()}
    return len(firsts) == 1 and () not in {shape for _, shape in firsts}
