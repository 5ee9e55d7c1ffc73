"""Name a rank so that a reader of the log finds it: its host, and its place in the mesh."""

from collections.abc import Sequence

import numpy as np

from tonari.trainer.mesh.mesh import AXES


def name(rank: int, sizes: tuple[int, ...], hosts: Sequence[str] = ()) -> str:
    """Name a rank, its host where there are several, and its place in the mesh, once known."""
    host = f" on {hosts[rank]}" if len(set(hosts)) > 1 else ""
    place = f" ({role(rank, sizes)})" if sizes else ""
    return f"rank {rank}{host}{place}"


def role(rank: int, sizes: tuple[int, ...]) -> str:
    """Describe where a rank stands along the axes that have several ranks: ``pp 1, tp 0``."""
    coordinates = np.unravel_index(rank, sizes)
    named = zip(AXES, coordinates, sizes, strict=True)
    return ", ".join(f"{name} {at}" for name, at, size in named if size > 1)
