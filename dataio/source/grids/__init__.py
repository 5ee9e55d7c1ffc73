"""Scientific array files -> samples: rows, whole files, tiles."""

from dataio.source.grids.array_files import ArrayFiles
from dataio.source.grids.listing import name_arrays
from dataio.source.grids.rows import open_rows

__all__ = ["ArrayFiles", "name_arrays", "open_rows"]
