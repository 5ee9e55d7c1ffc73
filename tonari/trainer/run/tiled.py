"""Samples of which each rank has a tile: what the settings ask of fields, and the task on tiles."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

import dataio
from dataio.rows.samples import Batch
from tonari.trainer.config.config import Config
from tonari.trainer.errors import ConfigError
from tonari.trainer.models.given import Inputs
from tonari.trainer.run.own import shape_of
from tonari.trainer.run.tasks import Columns, Task
from tonari.trainer.tiles import Grid, tiled

Fields = Mapping[str, dataio.Field]


def sample_shape(config: Config, task: Task, fields: Fields) -> tuple[int, ...]:
    """Find the shape of a whole sample of the model's input, [channels, spatial...].

    Raises:
        ConfigError: If a task has several inputs, or their shape is not one that can be cut so.
    """
    parts, columns = config.mesh.tiles, task.columns.input
    shaped = shape_of(fields[columns[0]]) if len(columns) == 1 and columns[0] in fields else None
    if shaped is None or len(shaped[0]) <= len(parts):
        found = ", ".join(map(repr, columns)) if shaped is None else f"{list(shaped[0])}"
        raise ConfigError(
            f"mesh.tiles is {list(parts)}, and the model's input is {found}, expected one field of "
            "the shape [channels, spatial...], with as many spatial axes; give data.image_size, or "
            "an Array"
        )
    return shaped[0]


def are_tiled(config: Config, fields: Fields | None) -> bool:
    """Say whether each tile of a field is read by itself, and refuse tiles that are no mesh's.

    Raises:
        ConfigError: If a field is cut otherwise than ``mesh.tiles``.
    """
    parts, found = config.mesh.tiles, False
    for name, field in (fields or {}).items():
        tiles = getattr(field, "tiles", None)
        if not isinstance(field, dataio.Array) or tiles is None:
            continue
        found = True
        if tiles.parts != parts or tiles.halo:
            raise ConfigError(
                f"fields: {name!r} has the tiles {list(tiles.parts)} with a halo of {tiles.halo}, "
                f"and mesh.tiles is {list(parts)}, expected the same tiles without a halo, which "
                "layers get from their neighbours; give both the same"
            )
        cut = [axis if isinstance(axis, str) else axis % len(field.shape) for axis in tiles.axes]
        if cut not in ([*range(at, at + len(cut))] for at in range(len(field.shape))):
            raise ConfigError(
                f"fields: {name!r} is cut along the axes {tiles.axes}, expected positions that "
                "follow one another, as those of mesh.tiles do, such as (1, 2) of [channels, "
                "height, width]; give these, in this order"
            )
    return found


def of_tile(fields: Fields, tile: int) -> dict[str, dataio.Field]:
    """Say of fields that are cut which tile a rank has."""
    return {
        name: replace(field, tiles=replace(field.tiles, index=tile))
        if isinstance(field, dataio.Array) and field.tiles is not None
        else field
        for name, field in fields.items()
    }


def uncut(fields: Fields) -> dict[str, dataio.Field]:
    """Say of fields that are cut that they are whole, as for one process that reads a run's."""
    return {
        name: replace(field, tiles=None) if isinstance(field, dataio.Array) else field
        for name, field in fields.items()
    }


class TiledTask:
    """A task of whole samples, of which this rank has a tile.

    Args:
        task: Its losses are those of whole samples: of torch's functions each gives that.
        grid: The ranks that share a sample.
        sample: [channels, spatial...] of the model's input.
        fields: Of a sample. What they do not cut, the loader gives whole, and is cut here.

    Raises:
        ConfigError: If a field is cut along other axes than its spatial ones, the last.
    """

    def __init__(self, task: Task, grid: Grid, sample: tuple[int, ...], fields: Fields) -> None:
        self._task, self._grid, self._sizes = task, grid, sample[1:]
        self._tiled = {
            name: field.shape[int(field.tiles.axes[0]) % len(field.shape) :]
            for name, field in fields.items()
            if isinstance(field, dataio.Array) and field.tiles is not None
        }
        for name in (*task.columns.input, *task.columns.target):
            if len(self._tiled.get(name, self._sizes)) != len(self._sizes):
                raise ConfigError(
                    f"fields: {name!r} is cut along the last {len(self._tiled[name])} axes, "
                    f"expected the last {len(self._sizes)}, those of height, width or such, as the "
                    f"model's input is {list(sample)}; give it tiles along these, or none"
                )
        if count := getattr(task, "num_targets", None):
            self.num_targets = count

    @property
    def columns(self) -> Columns:
        """Those of the task."""
        return self._task.columns

    def input(self, batch: Batch) -> Inputs:
        """Take this rank's tile of what the task takes."""
        inputs = self._task.input(batch)
        assert isinstance(inputs, Tensor), "sample_shape has seen one input"
        if self._task.columns.input[0] in self._tiled:
            return inputs
        return self._grid.part_of(inputs, len(self._sizes)).contiguous()

    def target(self, batch: Batch) -> Tensor:
        """Take the right answers; of fields that are cut a tile."""
        target = self._task.target(batch)
        sizes = self._tiled.get(self._task.columns.target[0])
        return target if sizes is None else tiled(target, self._grid, sizes)

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of whole samples, floating[batch], the same on each rank."""
        return self._task.losses(logits, target)

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Judge whole samples, the same on each rank."""
        return self._task.outcome(logits, target)
