"""What a loader leaves out, found among the samples of its source."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.base.filesystem import check_path
from dataio.base.location import bare
from dataio.documents import exclude_documents
from dataio.plan.exclusion import Exclusion, exclude_ids
from dataio.source import Source, TransformedSource
from dataio.source.base import ShardedSource
from dataio.source.names import find_name, find_named, read_names
from dataio.world import World
from dataio.world.agree import agree, together

Exclude = (
    str | os.PathLike[str] | Sequence[int] | Sequence[str | os.PathLike[str]] | NDArray[np.generic]
)
"""Samples by their ids or by a bool each; by their keys, or the paths of whole shards; or the path
of a list, or of some: CSV or Parquet files with a column ``sample_id`` or ``key``, or of packed
text ``document``."""

LISTS = (".csv", ".parquet", ".pq")
"""What the path of a list ends with."""

COMPARED = 256
"""Keys of a list that also has ids are compared with the source's, so many of them."""

ROWS_AT_ONCE = 1 << 20
"""Of a Parquet file: many, as ids are marked part by part."""

CURE = "give a list that was made of this source"


def find_excluded(given: Exclude, source: Source, world: World) -> Exclusion:
    """Find the samples and documents to leave out. Collective.

    Keys are looked up by rank 0, which reads those of all samples.

    Args:
        given: As the loader has it.
        source: The dataset.
        world: All ranks.

    Raises:
        ValueError: On all ranks, if an id, a key or a shard is not of the source, the list is not
            one, or nothing is left.
        SourceError: On all ranks, if the list's file cannot be read.
    """
    if isinstance(source, TransformedSource):
        source = source.inner
    documents: list[NDArray[np.integer]] = []
    if isinstance(given, str | os.PathLike):
        ids, keys = _of_path(os.fspath(given), source, world, documents)
    else:
        ids, keys = _of_values(given, source, world, documents)
    if keys:
        ids = [*ids, _ids_of(keys, source, world)]
    if any(map(len, documents)):
        exclusion = exclude_documents(np.unique(np.concatenate(documents)), ids, source, world)
    else:
        exclusion = exclude_ids(ids, source.num_samples)
    if not exclusion.num_left:
        raise ValueError(
            f"exclude: all {source.num_samples} samples of {source.name} are left out, expected "
            "some to train on; give a shorter list"
        )
    return exclusion


Found = tuple[list[NDArray[np.integer]], list[str]]
"""Ids, and keys that are to be looked up."""


def _of_values(
    given: Sequence[int] | Sequence[str | os.PathLike[str]] | NDArray[np.generic],
    source: Source,
    world: World,
    documents: list[NDArray[np.integer]],
) -> Found:
    values: NDArray[Any]
    values = given if isinstance(given, np.ndarray) else np.asarray(_plain_paths(given))
    if values.ndim != 1:
        raise ValueError(
            f"exclude: an array of shape {list(values.shape)}, expected one dimension; give a list "
            "of sample ids or keys, or a bool for each sample"
        )
    if not len(values):
        return [], []
    if values.dtype == np.bool_:
        if len(values) != source.num_samples:
            raise ValueError(
                f"exclude: {len(values)} bools, expected one for each of the {source.num_samples} "
                "samples; give them in the order of sample ids, or give the ids"
            )
        return [np.flatnonzero(values)], []
    if values.dtype.kind in "iu":
        if _may_be_mask(values):
            raise ValueError(
                f"exclude: {len(values)} whole numbers, each {values.min()} or {values.max()}, "
                "which may be a mask or ids that come many times, expected bools or ids; give "
                "mask.astype(bool) or np.unique(ids)"
            )
        return [cast("NDArray[np.integer]", values)], []
    strings = values.tolist()
    if not all(isinstance(value, str) for value in strings):
        raise ValueError(
            f"exclude: {values.dtype} values such as {strings[0]!r}, expected whole numbers, which "
            "are sample ids, bools or keys; convert them"
        )
    ids, keys = _shards_among(strings, source)
    for path in (key for key in keys if key.lower().endswith(LISTS)):
        more, found = _of_path(path, source, world, documents)
        ids, keys = [*ids, *more], [*keys, *found]
    return ids, [key for key in keys if not key.lower().endswith(LISTS)]


def _may_be_mask(values: NDArray[Any]) -> bool:
    """Whether all of them are 0, or 1, or 0 and one other number, as 255."""
    if len(values) < 3 or len(set(values[:3].tolist())) == 3:
        return False
    low, high = int(values.min()), int(values.max())
    is_two = low == 0 or low == high == 1
    return is_two and bool(((values == low) | (values == high)).all())


def _plain_paths(
    given: Sequence[int] | Sequence[str | os.PathLike[str]],
) -> Sequence[int] | Sequence[str]:
    if not any(isinstance(one, os.PathLike) for one in given[:1]):
        return given  # type: ignore[return-value]
    return [os.fspath(one) for one in given]  # type: ignore[arg-type]


def paths_among(given: Exclude) -> list[str]:
    """List what may be paths of shards."""
    each = [given] if isinstance(given, str | os.PathLike) else given
    are_paths = len(each) > 0 and isinstance(each[0], str | os.PathLike)
    return [bare(os.fspath(path)) for path in each] if are_paths else []  # type: ignore[arg-type]


def _shards_among(strings: list[str], source: Source) -> Found:
    """Take the samples of each string that is a shard's path; the others are keys."""
    shards = source.shards if isinstance(source, ShardedSource) else ()
    by_path = {shard.path: shard for shard in shards}
    whole = [by_path[path] for path in map(bare, strings) if path in by_path]
    ids = [np.arange(shard.first, shard.first + shard.num_samples) for shard in whole]
    return [*ids], [key for key in strings if bare(key) not in by_path]


def _of_path(
    path: str, source: Source, world: World, documents: list[NDArray[np.integer]]
) -> Found:
    whole, _ = _shards_among([path], source)
    if whole:
        return whole, []
    check_path(path, "exclude")
    columns = together(world, lambda: read_list(Path(path)), doing="read what to leave out")
    if "document" in columns:
        documents += columns["document"]
        return [], []
    if "sample_id" not in columns:
        return [], [key for keys in columns.get("key", []) for key in keys.tolist()]
    ids = columns["sample_id"]
    if "key" in columns and ids:
        _compare(path, ids[0], columns["key"][0], source, world)
    return [*ids], []


def read_list(path: Path) -> dict[str, list[NDArray[Any]]]:
    """Read the columns ``sample_id`` and ``key`` of a list, whichever it has, or ``document``.

    Raises:
        SourceError: If it cannot be read, has none, or a number is no whole one.
    """
    found: dict[str, list[NDArray[Any]]] = {}
    try:
        for batch in _batches(path):
            for name in batch.schema.names:
                if name == "key" and found.get("sample_id") and found.get("key"):
                    continue  # to compare, the first keys are enough
                found.setdefault(name, []).append(_plain(path, name, batch.column(name)))
        return found
    except (OSError, pa.ArrowInvalid, UnicodeError) as error:
        raise SourceError(
            f"exclude: {path} cannot be read ({error}), expected a CSV file in UTF-8 with a line "
            "of names, or a Parquet file (.parquet), with a column sample_id, key or document; "
            "correct the path, or write it so"
        ) from error


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    if path.suffix.lower() in LISTS[1:]:
        file = pq.ParquetFile(path, pre_buffer=False)
        yield from file.iter_batches(ROWS_AT_ONCE, columns=_columns(path, file.schema_arrow.names))
        return
    with pa.csv.open_csv(path) as reader:
        wanted = _columns(path, reader.schema.names)
    types = {name: pa.string() if name == "key" else pa.int64() for name in wanted}
    options = pa.csv.ConvertOptions(include_columns=wanted, column_types=types)
    parsing = pa.csv.ParseOptions(newlines_in_values=True)
    with pa.csv.open_csv(path, convert_options=options, parse_options=parsing) as reader:
        yield from reader


def _columns(path: Path, names: Sequence[str]) -> list[str]:
    wanted = [name for name in ("sample_id", "key") if name in names]
    wanted = ["document"] if "document" in names else wanted
    if not wanted:
        raise SourceError(
            f"exclude: {path} has the columns {', '.join(names)[:200]}, expected sample_id, key or "
            "document; name the column so, in its first line if it is CSV"
        )
    if several := [name for name in wanted if names.count(name) > 1]:
        raise SourceError(
            f"exclude: {path} has {names.count(several[0])} columns {several[0]}, expected one, as "
            "nothing says which is meant; leave the others out"
        )
    return wanted


def _plain(path: Path, name: str, column: pa.Array) -> NDArray[np.generic]:
    if column.null_count and name != "key":
        raise SourceError(
            f"exclude: {path} has {column.null_count} rows without a {name}, expected one in "
            "each; leave the column out, or fill it"
        )
    values: NDArray[np.generic] = column.to_numpy(zero_copy_only=False)
    if name != "key" and values.dtype.kind not in "iu":
        raise SourceError(
            f"exclude: {path}: {name} is {column.type}, expected whole numbers; convert them"
        )
    if name == "sample_id" and len(values) and values.min() >= 0 and values.max() < 1 << 31:
        return values.astype(np.int32)  # half the memory of a long list
    return values


def _compare(
    path: str,
    ids: NDArray[np.integer],
    keys: NDArray[np.generic],
    source: Source,
    world: World,
) -> None:
    """Refuse a list whose keys are not those of its ids in this source. Collective."""
    places = np.unique(np.linspace(0, len(ids) - 1, COMPARED).astype(np.int64))
    _, first = np.unique(ids[places], return_index=True)
    places = places[first]
    places = places[[isinstance(key, str) and key != "" for key in keys[places].tolist()]]

    def look() -> bytes:
        if world.rank or not len(places) or (field := find_name(source)) is None:
            return b"[]"
        mine = ids[places].astype(np.int64)
        named = zip(
            mine.tolist(), keys[places].tolist(), read_names(source, field, mine), strict=True
        )
        return json.dumps([row for row in named if row[1] != row[2]]).encode()

    wrong = json.loads(agree(world, look, doing="compare keys of what to leave out")[0])
    if wrong:
        sample_id, said, found = wrong[0]
        raise ValueError(
            f"{path}: says that sample {sample_id} is {said!r}, and the source has {found!r} there "
            f"({len(wrong)} of {len(places)} that were compared differ), expected the same; {CURE}"
        )


def _ids_of(keys: Sequence[str], source: Source, world: World) -> NDArray[np.int64]:
    """Find the samples of some keys. Collective.

    Raises:
        ValueError: On all ranks, if one is of no sample, or of several.
    """

    def look() -> bytes:
        if world.rank:
            return b""
        if (field := find_name(source)) is None:
            return b"{}"
        found, several = find_named(source, field, set(keys))
        missing = [key for key in keys if key not in found]
        reply = {"ids": list(found.values()), "missing": missing, "several": list(several.items())}
        return json.dumps(reply).encode()

    reply = json.loads(agree(world, look, doing="find the samples to leave out")[0])
    if not reply:
        raise ValueError(
            f"exclude: {source.name} has no keys, found {bare(keys[0])!r} to leave out, expected "
            "sample ids; give these, or a list with a column sample_id"
        )
    if reply["missing"]:
        raise ValueError(
            f"exclude: {len(reply['missing'])} of {len(keys)} keys are of no sample of "
            f"{source.name}, such as {bare(reply['missing'][0])!r}, expected keys, or paths of "
            f"shards, as the source has them; {CURE}"
        )
    if reply["several"]:
        key, (one, other) = reply["several"][0]
        raise ValueError(
            f"exclude: the key {key!r} is that of the samples {one} and {other} of {source.name}, "
            "expected one sample a key; give sample ids instead"
        )
    return np.array(reply["ids"], np.int64)
