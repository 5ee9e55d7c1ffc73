"""`tonari stats`: mean, deviation and range of a dataset's pictures and numbers, on any ranks."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Annotated

import numpy as np
import tyro
from numpy.typing import NDArray

from dataio import Array, Field, Float, Image, Int, Source, open_source
from dataio.base.progress import ProgressBar
from dataio.rows.decode import decode_image, image_shape
from dataio.rows.rows import Rows, row_offsets
from dataio.source.formats.grids.source import ArrayFilesSource
from dataio.source.names import IMAGE_KEYS, fields_there
from dataio.world import World
from dataio.world.agree import together
from tonari.cache.stage import along, parse_fields
from tonari.errors import CommandError
from tonari.probes import join
from tonari.report.tables import UNKNOWN, Table
from tonari.stats.moments import Moments, measure, merge

NAMES = ("mean", "std", "min", "max", "count", "nonfinite")
"""As they are printed, in that order."""
MOST_CHANNELS = 64
"""Along an axis of more places they are hardly quantities of their own."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Find mean, standard deviation, least and largest value of a dataset, in one pass.

    Of pictures those of each channel, in [0, 1]; of arrays those of all values, or with --per of
    each place along an axis. Values that are not finite are counted and left out. Under mpiexec,
    srun or torchrun each rank reads a part. Nothing is cached. The last lines are those to put
    into a TOML file of `tonari train`, or into a loop.
    """

    dataset: Annotated[str, tyro.conf.Positional]
    """Whatever a loader opens: shards, an image folder, array files."""
    fields: tuple[str, ...] = ()
    """Some of the samples' fields, as in `tonari cache stage`: image=image:jpg, or
    x=array:float32:64x64:t2m. Defaults to the pictures, and to all numbers of array files."""
    axis: str | None = None
    """Of array files: the axis whose places are the samples, such as time, or 0. Defaults to the
    first of all arrays, if it is the same."""
    per: str = ""
    """Of arrays: the axis of a sample along which each place has figures of its own, such as
    channel, or 0; -1 is the last."""
    rows: int = 0
    """Look at about so many samples, spread over all; 0: at all."""
    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run the command. Collective under a launcher.

    Raises:
        CommandError: If a field has no numbers, or --per names no axis.
        DataioError: If the data cannot be read.
    """
    options = tyro.cli(
        Stats, args=argv, prog="tonari stats", config=(tyro.conf.FlagCreatePairsOff,)
    )
    try:
        fields = parse_fields(options.fields) if options.fields else {}
    except ValueError as error:
        raise CommandError(str(error)) from error
    with join() as world:
        source = open_source(along(options.dataset, options.axis), world=world)
        fields = fields or together(world, lambda: _usual(source), doing="look for fields")
        found, num_rows = measure_source(source, fields, world, per=options.per, rows=options.rows)
        if world.rank == 0:
            document = {name: _figures(its) for name, its in found.items()}
            if options.json:
                print(json.dumps({"samples": num_rows, "fields": document}, indent=1))
            else:
                lines = [*_words(document, fields, num_rows, source.num_samples)]
                print("\n".join([*lines, *(() if options.per else _hints(source, fields))]))
    return 0


def measure_source(
    source: Source, fields: Mapping[str, Field], world: World, *, per: str = "", rows: int = 0
) -> tuple[dict[str, Moments], int]:
    """Measure fields of a source, each rank a part of its samples. Collective.

    Args:
        source: Opened by all ranks together.
        fields: Pictures, arrays, numbers.
        world: The ranks.
        per: The axis of an array's sample whose places are measured each by itself; "": none.
        rows: Of how many samples, about; 0: of all.

    Returns:
        The figures of each field, the same on every rank; and how many samples were read.

    Raises:
        CommandError: If a field has no numbers, or there is no such axis.
        DataioError: On all ranks, if the data cannot be read.
    """
    axes = {name: _channel_axis(source, field, per) for name, field in fields.items()}
    ids = np.arange(0, source.num_samples, math.ceil(source.num_samples / (rows or math.inf)) or 1)
    mine = np.array_split(ids, world.world_size)[world.rank]

    def read() -> dict[str, Moments]:
        found: dict[str, Moments] = {}
        bar = ProgressBar("stats", len(mine), shown=world.rank == 0)
        for block in source.read(mine, fields) if len(mine) else ():
            for name, values in _channels(block, fields, axes):
                part = measure(values)
                found[name] = merge(found[name], part) if name in found else part
            bar.add(len(block))
        bar.close()
        return found

    own = together(world, read, doing="measure the samples")
    text = json.dumps({name: its.tolist() for name, its in own.items()}).encode()
    parts = [json.loads(part) for part in world.allgather(text, doing="merge the figures")]
    return {
        name: reduce(merge, (np.array(part[name]) for part in parts if part)) for name in fields
    }, len(ids)


def _usual(source: Source) -> dict[str, Field]:
    """Choose what is measured where nobody says."""
    if isinstance(source, ArrayFilesSource):
        return {**source.number_fields()}
    return {its.key: its for its in fields_there(source, IMAGE_KEYS, (Image,), "image")}


def _channel_axis(source: Source, field: Field, per: str) -> int | None:
    """Find the axis of a sample that --per names; None: all of its values are one channel.

    Raises:
        CommandError: If there is none, or the field has no numbers.
    """
    if isinstance(field, Image):
        return -1
    if not isinstance(field, Array | Int | Float):
        raise CommandError(
            f"--fields: {field.key!r} is {type(field).__name__}, expected a picture, an array or a "
            "number; leave it out"
        )
    if not per or not isinstance(field, Array):
        return None
    names = _names(source, field)
    number = names.index(per) if per in names else int(per) if per.lstrip("-").isdigit() else None
    if number is None or not -len(field.shape) <= number < len(field.shape):
        raise CommandError(
            f"--per {per}: a sample of {field.key!r} has the axes {', '.join(names)} "
            f"of the lengths {list(field.shape)}; name one of them, or give its number from 0"
        )
    return number


def _names(source: Source, field: Array) -> tuple[str, ...]:
    """Name a sample's axes, by their numbers where they have no names."""
    names = source.sample_dims(field.key) if isinstance(source, ArrayFilesSource) else ()
    return tuple(name or str(at) for at, name in enumerate(names or ("",) * len(field.shape)))


def _hints(source: Source, fields: Mapping[str, Field]) -> Iterator[str]:
    """Point at axes whose places may be quantities that have nothing in common."""
    for name, field in fields.items():
        if isinstance(field, Array) and any(1 < n <= MOST_CHANNELS for n in field.shape):
            axes = dict(zip(_names(source, field), field.shape, strict=True))
            few = min(axes, key=lambda axis: (axes[axis] == 1, axes[axis]))
            shown = ", ".join(f"{axis} ({length})" for axis, length in axes.items())
            yield (
                f"\nThis is {name} over all places along {shown}; "
                f"--per {few} gives each place a line."
            )


def _channels(
    block: Rows, fields: Mapping[str, Field], axes: Mapping[str, int | None]
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Give values[num_channels, n] of the fields of some rows; of pictures one by one."""
    for column, data in zip(block.schema.fixed, block.fixed, strict=True):
        values = np.ascontiguousarray(data).view(column.dtype).reshape(len(block), *column.shape)
        axis = axes[column.name]
        if axis is None:
            yield column.name, values.reshape(1, -1)
        else:
            # [num_channels, samples and all other axes]
            first = np.moveaxis(values, axis + (axis >= 0), 0)
            yield column.name, first.reshape(len(first), -1)
    for number, name in enumerate(block.schema.variable):
        field, bounds = fields[name], row_offsets(block.lengths[:, number])
        assert isinstance(field, Image), "others have one shape"
        for row in range(len(block)):
            stored = block.variable[number][bounds[row] : bounds[row + 1]]
            shape = field.out or image_shape(stored)
            pixels = np.empty((*shape, field.channels), np.uint8)
            decode_image(stored, pixels, field, where=f"sample {block.sample_id[row]}")
            yield name, pixels.reshape(-1, field.channels).T / 255


def _figures(moments: Moments) -> dict[str, list[float | None]]:
    """Name the figures of a field; None where no value is finite."""
    count, mean, m2, least, most, nonfinite = moments
    std = np.sqrt(m2 / np.maximum(count, 1))
    named = [
        [value if count[at] else None for at, value in enumerate(its.tolist())]
        for its in (mean, std, least, most)
    ]
    return dict(zip(NAMES, (*named, count.tolist(), nonfinite.tolist()), strict=True))


def _words(
    document: Mapping[str, Mapping[str, list[float | None]]], fields: Mapping[str, Field],
    num_rows: int, num_samples: int,
) -> Iterator[str]:  # fmt: skip
    rows = [
        [name, str(channel), *(_shown(figures[figure][channel]) for figure in NAMES)]
        for name, figures in document.items()
        for channel in range(len(figures["mean"]))
    ]
    title = f"{num_rows:,} of {num_samples:,} samples"
    yield from Table(["field", "channel", *NAMES], rows, title).text()
    for name, figures in document.items():
        is_picture = isinstance(fields[name], Image)
        yield "\n[augment]  # of tonari train" if is_picture else f"\n# of {name}, in a loop"
        for figure in ("mean", "std"):
            yield f"{figure} = [{', '.join(map(_shown, figures[figure]))}]"


def _shown(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.9g}"
