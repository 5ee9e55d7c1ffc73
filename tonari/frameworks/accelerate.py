"""Accelerate: the loader's state in Accelerate's own."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator

import dataio


def save_with(accelerator: Accelerator, loader: dataio.Loader) -> None:
    """Let ``save_state`` save a loader too, and ``load_state`` restore it, in its ``loader``.

    The loader itself goes into no ``prepare``: it has dealt the rows out to the ranks already.
    """

    def save(models: Any, weights: Any, directory: str) -> None:
        loader.save(Path(directory) / "loader")

    def restore(models: Any, directory: str) -> None:
        loader.restore(Path(directory) / "loader")

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(restore)
