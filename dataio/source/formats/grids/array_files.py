"""Scientific array files as a source: HDF5, NetCDF, Zarr, ``.npz`` and ``.npy``."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from dataio.base.checked import checked
from dataio.base.errors import SourceError
from dataio.source.counts import own_part
from dataio.source.expand import shown_name
from dataio.source.formats.grids.listing import FORMATS, format_of, list_files
from dataio.source.formats.grids.numbering import Axis, describe
from dataio.source.formats.grids.source import ArrayFilesSource, FoundFile
from dataio.source.formats.grids.variables import Variable
from dataio.source.storage.files import Storage
from dataio.source.storage.retry import Retry
from dataio.source.storage.throttle import Throttle
from dataio.world import World, single_world
from dataio.world.agree import agree


@checked
@dataclass(frozen=True)
class ArrayFiles:
    """Files of arrays for a `Loader` to open, and which part of them a sample is.

    A field's key names a variable, such as ``Array("group/temperature", (64, 64), "float32")``. Of
    a variable a sample holds, along the row axis, one index, and the dimension is gone; along a
    tiled axis one tile; of any other dimension everything. A variable that lacks an axis is given
    by the axes that it has, so one that lacks all of them, such as a mask, is given whole to every
    sample. Values are those in the file: ``scale_factor`` and fill values are not applied.

    Samples are numbered file after file. Along one axis they are in its order; along several, those
    that share chunks of the file have neighbouring numbers, so that a node that stages some of
    the samples reads its own chunks only, each once.

    Attributes:
        names: Files of HDF5, NetCDF, ``.npz`` or ``.npy`` (its one array is "arr_0"), or Zarr
            stores: a path, a glob, a brace pattern, a directory of them, a URL, or several.
        axis: The row axis, by the dimension's name, or by its position in every variable. None:
            a sample is a whole file, or a tile of one.
        tiles: The length of a tile along each axis that is tiled, such as
            ``{"lat": 64, "lon": 64}``, or ``{-2: 64, -1: 64}`` by position.
        strides: From the start of one tile to that of the next, along a tiled axis; defaults to its
            tile's length. With less, tiles overlap, and what they share is kept in each of them:
            pairs of times with the stride 1 take twice the bytes of the file.
        edge: What becomes of the end of a tiled axis where no whole tile fits: "refuse" the file,
            or "drop" it.
        dims: Names of a variable's dimensions, where the file gives none or wrong ones, such as
            ``{"temperature": ("time", "lat", "lon")}``.
        retry: How long a request may last, and be repeated.
        throttle: Slows down every read.
    """

    names: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    _: KW_ONLY
    axis: str | int | None = 0
    tiles: Mapping[str | int, int] = field(default_factory=dict)
    strides: Mapping[str | int, int] = field(default_factory=dict)
    edge: Literal["refuse", "drop"] = "refuse"
    dims: Mapping[str, Sequence[str]] = field(default_factory=dict)
    retry: Retry | None = None
    throttle: Throttle | None = None

    def __post_init__(self) -> None:
        if not self._names:
            raise ValueError(
                'ArrayFiles: names is empty, expected files such as "runs/*.h5"; name some'
            )
        for key, length in self.tiles.items():
            if length < 1 or key == self.axis:
                raise ValueError(
                    f"ArrayFiles: tiles has {length} along {key!r}, must be >= 1 and along another "
                    "axis than the row axis; give axis=None to cut the files into tiles alone"
                )

        for key, stride in self.strides.items():
            if key not in self.tiles or not 1 <= stride <= self.tiles[key]:
                raise ValueError(
                    f"ArrayFiles: strides has {stride} along {key!r}, must be in [1, the tile's "
                    "length] along an axis that tiles names; correct it"
                )

    @property
    def _names(self) -> list[str]:
        if isinstance(self.names, (str, os.PathLike)):
            return [os.fspath(self.names)]
        return [os.fspath(name) for name in self.names]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """What divides a file into samples, the row axis first."""
        rows = () if self.axis is None else (Axis(self.axis, is_row=True),)
        tiles = self.tiles.items()
        return (*rows, *(Axis(k, n, overlap=n - self.strides.get(k, n)) for k, n in tiles))

    def open(
        self, world: World | None = None, *, storage: Storage | None = None
    ) -> ArrayFilesSource:
        """Find what the files hold. Collective: one rank lists them, each looks into a part.

        Args:
            world: The ranks that open it; by default this process alone.
            storage: Reads, with its own limits; by default with those of this object.

        Raises:
            SourceError: On every rank, if a pattern names nothing, a file is damaged or unknown, or
                it lacks an axis.
        """
        world = world if world is not None else single_world()
        storage = storage if storage is not None else Storage(self.throttle, retry=self.retry)

        def listing() -> bytes:
            if world.rank:
                return b""
            return json.dumps([list_files(self._names, storage), storage.urls]).encode()

        paths, urls = json.loads(agree(world, listing, doing="list the array files")[0])
        storage.adopt_urls(urls)
        own = own_part(len(paths), world)

        def look() -> bytes:
            return json.dumps([self._look(paths[i], storage) for i in own]).encode()

        parts = agree(world, look, doing="look into the array files")
        found = [FoundFile.of(*entry) for part in parts for entry in json.loads(part)]
        for i, file in enumerate(found):
            if file.kind != "zarr":
                # Another node's copy may have another time.
                num_bytes, mtime_ns = map(int, file.version)
                storage.expect(file.path, num_bytes, mtime_ns if i in own else None)
        tiles = [*self.tiles.items(), *self.strides.items()]
        return ArrayFilesSource(
            shown_name(self._names),
            found,
            self.axes,
            declared=[self.axis, tiles, self.edge, [*self.dims.items()]],
            drop_edge=self.edge == "drop",
            storage=storage,
        )

    def _look(self, path: str, storage: Storage) -> list[object]:
        kind = format_of(path, storage)
        version = FORMATS[kind].version(storage, path)
        with FORMATS[kind].opened(storage, path) as file:
            found = {name: self._named(path, name, v) for name, v in file.variables.items()}
        return [path, kind, version, found]

    def _named(self, path: str, name: str, variable: Variable) -> Variable:
        dims = self.dims.get(name, variable.dims)
        if len(dims) != len(variable.shape):
            raise SourceError(
                f"{path}: the variable {name!r} has the shape {list(variable.shape)}, expected "
                f"the dimensions {', '.join(dims)}; correct dims"
            )
        return variable._replace(dims=tuple(dims))


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
                'of those arrays that fields name (or axis="time"), axis=None for whole files, or '
                f"{file.path}/NAME for one array; commands have --axis; see docs/grids.md"
            )
    return source


def _has_rows(file: FoundFile) -> bool:
    firsts = {(v.dims[:1], v.shape[:1]) for v in file.variables.values()}
    return len(firsts) == 1 and () not in {shape for _, shape in firsts}
