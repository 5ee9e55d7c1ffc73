"""Scientific array files -> samples: rows, whole files, tiles."""

from dataio.source.formats.grids.array_files import ArrayFiles
from dataio.source.formats.grids.listing import name_arrays
from dataio.source.formats.grids.rows import open_rows

__all__ = ["ArrayFiles", "name_arrays", "open_rows"]
