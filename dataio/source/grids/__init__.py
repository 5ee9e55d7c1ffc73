"""Scientific array files -> samples: rows, whole files, tiles."""

from dataio.source.grids.array_files import ArrayFiles

__all__ = ["ArrayFiles"]
