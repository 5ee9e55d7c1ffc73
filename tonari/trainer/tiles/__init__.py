"""One sample on several ranks: each has a tile, and gets of its neighbours what layers need."""

# Each names the functions that it computes.
from tonari.trainer.tiles import attention, layers, positions, windows
from tonari.trainer.tiles.grid import Grid
from tonari.trainer.tiles.model import tile_model, tile_stages
from tonari.trainer.tiles.tensor import TiledTensor, tiled, whole

__all__ = [
    "Grid", "TiledTensor", "attention", "layers", "positions", "tile_model", "tile_stages",
    "tiled", "whole", "windows",
]  # fmt: skip
