"""Scientific array files -> samples: rows, whole files, tiles."""

from dataio.source.formats.grids.array_files import ArrayFiles, open_rows
from dataio.source.formats.grids.listing import list_files, name_arrays

__all__ = ["ArrayFiles", "list_files", "name_arrays", "open_rows"]
