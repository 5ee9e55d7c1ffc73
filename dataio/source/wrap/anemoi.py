"""Datasets of ECMWF's anemoi as a source: a sample is some dates, and each date is read once."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.checked import checked
from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Array, Field
from dataio.rows.rows import Rows
from dataio.source.base import check_ids
from dataio.source.formats.arrays import array_rows
from dataio.source.formats.grids import list_files
from dataio.source.formats.grids.zarr import ZarrFormat
from dataio.source.row_block import BLOCK_BYTES
from dataio.source.storage.files import Storage
from dataio.source.storage.retry import Retry
from dataio.source.storage.throttle import Throttle
from dataio.source.wrap.torch_dataset import MapDataset
from dataio.world import World, single_world
from dataio.world.agree import agree

DATA = "data"
STATISTICS = ("mean", "stdev", "minimum", "maximum")
Moment = str | int | datetime


@checked
@dataclass(frozen=True)
class Anemoi:
    """A dataset of ECMWF's anemoi for a `Loader` to open, and which dates a sample has.

    A sample is ``data``: dtype[offsets, ensemble, grid, variable], the layout of anemoi-training. A
    sample that would hold a missing date is left out, as there. Samples are numbered by their first
    dates. Values are those in the dataset: normalise them with ``statistics``. All attributes but
    what is given read the dataset's metadata when they are first asked for.

    Attributes:
        dataset: The path or URL of a Zarr store that anemoi-datasets wrote, for which the extra
            ``zarr`` suffices; or what ``anemoi.datasets.open_dataset`` returned, with the same
            arguments on every rank.
        offsets: Which dates a sample has, counted from its first one in dates of the dataset:
            ``(0, 1)`` is a pair, ``(0, 6, 12)`` three that are six apart.
        stride: From the first date of a sample to that of the next, in dates of the dataset.
        variables: Those to keep, by name, in this order; None: all.
        start: The first date that a sample may hold, such as 2020, "2020-06" or
            "2020-06-01T06:00"; None: that of the dataset.
        end: The last one. A year, a month or a day is meant to its end.
        retry: How long a request for a store may last, and be repeated.
        throttle: Slows down every read of a store.

    Raises:
        ValueError: If offsets do not ascend from 0, or the stride is < 1.
    """

    dataset: str | os.PathLike[str] | MapDataset
    _: KW_ONLY
    offsets: Sequence[int] = (0, 1)
    stride: int = 1
    variables: Sequence[str] | None = None
    start: Moment | None = None
    end: Moment | None = None
    retry: Retry | None = None
    throttle: Throttle | None = None

    def __post_init__(self) -> None:
        offsets = [*self.offsets]
        if offsets[:1] != [0] or (np.diff(offsets) < 1).any() or self.stride < 1:
            raise ValueError(
                f"Anemoi: offsets is {offsets} and stride {self.stride}, expected numbers that "
                "ascend from 0, such as range(3), and a stride >= 1; correct them"
            )

    @property
    def fields(self) -> dict[str, Field]:
        """What to give a `Loader` as its fields: ``data``."""
        _, _, num_members, num_points = self.facts.shape
        shape = (len(self.offsets), num_members, num_points, len(self.columns))
        return {DATA: Array(DATA, shape, str(np.dtype(self.facts.dtype)))}

    @property
    def statistics(self) -> dict[str, NDArray[np.floating[Any]]]:
        """``mean``, ``stdev``, ``minimum``, ``maximum`` of the whole dataset: float[variable]."""
        return {key: values[self.columns] for key, values in self.facts.statistics.items()}

    @cached_property
    def dates(self) -> NDArray[np.datetime64]:
        """datetime64[num_samples, offsets]: The dates of each sample."""
        places = self.firsts[:, None] + np.array(self.offsets)
        found: NDArray[np.datetime64] = np.asarray(self.facts.dates)[places]
        return found

    @cached_property
    def columns(self) -> list[int]:
        """Where the variables that are kept stand in the dataset.

        Raises:
            ValueError: If it lacks one.
        """
        known = {name: at for at, name in enumerate(self.facts.variables)}
        names = list(known) if self.variables is None else self.variables
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"Anemoi: variables names {', '.join(unknown)}, expected some of "
                f"{', '.join(known)}; correct the names"
            )
        return [known[name] for name in names]

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """int64[num_samples]: The number of each sample's first date in the dataset.

        Raises:
            SourceError: If there is no sample.
        """
        dates = np.asarray(self.facts.dates)
        is_there = ~np.isin(np.arange(len(dates)), list(self.facts.missing))
        if self.start is not None:
            is_there &= dates >= _moment("start", self.start)
        if self.end is not None:
            is_there &= dates < _moment("end", self.end) + 1  # of its unit: the whole year or day
        firsts = np.arange(max(len(dates) - self.offsets[-1], 0))
        firsts = firsts[is_there[firsts[:, None] + np.array(self.offsets)].all(axis=1)]
        if not len(firsts):
            raise SourceError(
                f"Anemoi: none of {len(dates)} dates, {dates[0]} to {dates[-1]}, begins a sample "
                f"with the offsets {[*self.offsets]} from {self.start} to {self.end}, expected at "
                f"least one; {len(self.facts.missing)} dates are missing: check start and end"
            )
        return np.compress((firsts - firsts[0]) % self.stride == 0, firsts)

    def open(self, world: World | None = None) -> "AnemoiSource":
        """Open the dataset. Collective: one rank looks whether a store is another than before.

        Raises:
            SourceError: On every rank, if it is no dataset of anemoi's, or holds no sample.
        """
        world = world if world is not None else single_world()

        def look() -> bytes:
            num_samples = len(self.firsts)  # on every rank: all stop where one cannot read it
            looks = self.path is not None and not world.rank
            version = ZarrFormat().version(self.storage, self.path or "") if looks else []
            return json.dumps([num_samples, *version]).encode()

        return AnemoiSource(self, agree(world, look, doing="look at the dataset of anemoi")[0])

    @cached_property
    def storage(self) -> Storage:
        """Reads a store, and counts."""
        return Storage(self.throttle, retry=self.retry)

    @cached_property
    def path(self) -> str | None:
        """Of the store; None: ``dataset`` is open already."""
        if not isinstance(self.dataset, (str, os.PathLike)):
            return None
        return list_files([os.fspath(self.dataset)], self.storage)[0]

    @cached_property
    def facts(self) -> Any:
        """What the dataset says of itself: what is open already, or what a store holds.

        Raises:
            SourceError: If a store is not laid out as anemoi's are.
        """
        if self.path is None:
            return self.dataset
        with ZarrFormat().opened(self.storage, self.path) as file:
            shape = file.variables[DATA].shape if DATA in file.variables else ()
            found, named = file.variables.keys(), "variables" in file.attributes
            if not (named and {"dates", *STATISTICS} <= found and len(shape) == 4):
                raise SourceError(
                    f"{self.path}: holds {', '.join(found)}{' and variables' * named}, expected "
                    f"the arrays data [time, variable, ensemble, grid], dates, "
                    f"{', '.join(STATISTICS)} and the attribute variables that "
                    "anemoi-datasets writes; read other stores by ArrayFiles"
                )
            dates, *statistics = (file.read(key, (slice(None),)) for key in ("dates", *STATISTICS))
            dates = dates.astype("datetime64[s]")
            if len(np.unique(np.diff(dates))) > 1:
                raise SourceError(
                    f"{self.path}: its dates are not evenly spaced, expected all dates, those that "
                    "are missing too; write it again by a newer anemoi-datasets"
                )
            missing = np.array(file.attributes.get("missing_dates", []), "datetime64[s]")
            return SimpleNamespace(
                dates=dates, missing=np.flatnonzero(np.isin(dates, missing)), shape=shape,
                variables=file.attributes["variables"], dtype=file.variables[DATA].dtype,
                statistics=dict(zip(STATISTICS, statistics, strict=True)),
            )  # fmt: skip


class AnemoiSource:
    """A `Source` of samples of a dataset of anemoi; made by `Anemoi.open`.

    ``bytes_read`` counts a store's bytes as they are stored, of what was open already its values.
    """

    made_as = "Anemoi"
    total_bytes = 0

    def __init__(self, declared: Anemoi, version: bytes) -> None:
        facts, self._declared = declared.facts, declared
        self.num_samples = len(declared.firsts)
        self.shard_starts = np.zeros(1, np.int64)
        chosen = [[*declared.offsets], declared.columns, declared.firsts.tolist()]
        key = xxhash.xxh3_64_hexdigest(json.dumps(chosen).encode())
        digest = xxhash.xxh3_64(version + json.dumps([facts.variables, *facts.shape]).encode())
        for values in (facts.dates, *facts.statistics.values()):
            digest.update(np.ascontiguousarray(values).tobytes())
        self.fingerprint = f"{digest.hexdigest()}{key}"
        self.name = f"{declared.path or f'anemoi://{digest.hexdigest()}'}#{key}"
        self._num_bytes = 0

    @property
    def bytes_read(self) -> int:
        return self._num_bytes or self._declared.storage.bytes_read

    def place_of(self, sample_id: int) -> str:
        """Name a sample's dates."""
        dates = self._declared.dates[sample_id]
        return f"{self._declared.path or 'anemoi'}[{', '.join(map(str, dates))}]"

    def read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        """Read samples, each date once; see `Source.read`. Holds the dates that it needs again."""
        check_ids(self, sample_ids)
        for name, field in fields.items():
            if field.key != DATA:
                raise FieldError(
                    f"{self.name}: has the key {DATA!r} alone, expected it for field {name!r}, "
                    f"found {field.key!r}; give fields=anemoi.fields"
                )
        return self._read(sample_ids, fields)

    def _read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        firsts, offsets = self._declared.firsts[sample_ids], np.array(self._declared.offsets)
        facts, num_columns = self._declared.facts, len(self._declared.columns)
        date_bytes = int(np.prod(facts.shape[2:])) * num_columns * np.dtype(facts.dtype).itemsize
        per_block = max(BLOCK_BYTES // max(date_bytes * len(offsets), 1), 1)
        held: dict[int, NDArray[np.generic]] = {}
        with self._opened() as read:
            for start in range(0, len(firsts), per_block):
                # int64[n, offsets]
                dates = firsts[start : start + per_block, None] + offsets
                held = {date: value for date, value in held.items() if date >= dates[0, 0]}
                lacking = np.setdiff1d(dates, [*held])
                for run in np.split(lacking, np.flatnonzero(np.diff(lacking) > 1) + 1):
                    if len(run):
                        held |= zip(run.tolist(), read(int(run[0]), int(run[-1]) + 1), strict=True)
                # dtype[n, offsets, ensemble, grid, variable]
                values = np.array([[held[date] for date in row] for row in dates.tolist()])
                ids = sample_ids[start : start + per_block]
                yield array_rows(ids, {(DATA, None): values}, fields, self.name)

    @contextmanager
    def _opened(self) -> Iterator[Callable[[int, int], NDArray[np.generic]]]:
        """Offer what reads the dates [start, stop): dtype[dates, ensemble, grid, variable]."""
        declared, rest = self._declared, tuple(slice(0, n) for n in self._declared.facts.shape[1:])

        def kept(values: NDArray[np.generic]) -> NDArray[np.generic]:
            return values[:, declared.columns].transpose(0, 2, 3, 1)

        def read_opened(start: int, stop: int) -> NDArray[np.generic]:
            values = np.asarray(declared.facts[start:stop])
            self._num_bytes += values.nbytes
            return kept(values)

        if declared.path is None:
            yield read_opened
        else:
            with ZarrFormat().opened(declared.storage, declared.path) as file:
                yield lambda start, stop: kept(file.read(DATA, (slice(start, stop), *rest)))


def _moment(name: str, given: Moment) -> "np.datetime64":
    try:
        return np.datetime64(str(given) if isinstance(given, int) else given)
    except ValueError as error:
        raise ValueError(
            f'Anemoi: {name} is {given!r}, expected a date such as 2020, "2020-06" or '
            f'"2020-06-01T06:00" ({error}); correct it'
        ) from error
