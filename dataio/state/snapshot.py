"""A loader's state on disk: a small JSON file, and each node's scores as an Arrow table.

Each holds its own checksum, and the JSON file those of the tables: parts of two saves are never
taken for one.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataio.base.atomic import parse_table, write_record, write_table
from dataio.base.errors import DamagedFileError, StateError
from dataio.exchange.directory import all_to_all, by_keeper
from dataio.plan.history import COLUMNS, Scores, score_dtype, unscored
from dataio.plan.policies import Selection
from dataio.state.saves import CURE, find_save, lost, named, read_saved, replacing
from dataio.world import World
from dataio.world.agree import agree, together

STATE = "state.json"
COUNTS = ("count", "before", "now")
"""Columns that a table has where rows come several times: in the epoch, and so far."""

SUM_BYTES = 8
"""Of the checksum, with which a table's file ends."""

Part = tuple[NDArray[np.void], dict[str, Any]]
"""A node's rows, and what was selected of all."""


def _row_dtype(scores: np.dtype[np.void]) -> np.dtype[np.void]:
    fields = [
        ("sample_id", "<i8"),
        ("hidden_place", "<i8"),
        ("weight", "<f4"),
        ("count", "<i8"),
        ("before", "<i8"),
        ("now", "<i8"),
        ("scores", scores),
    ]
    return np.dtype(fields)


@dataclass(frozen=True)
class NodeSnapshot:
    """What one node saves.

    Attributes:
        sample_id: int64[num_slots]: For the check that a row gets its own score.
        scores: scores[num_slots].
        selection: The running epoch's choice, after topping up.
        before: int64[num_slots]: How often each was trained in ended segments of the epoch.
        now: int64[num_slots]: How often in the running one.
    """

    sample_id: NDArray[np.int64]
    scores: Scores
    selection: Selection
    before: NDArray[np.int64]
    now: NDArray[np.int64]


@dataclass(frozen=True)
class Saved:
    """What `state.json` says of a save.

    Attributes:
        path: The directory.
        state: Where the loader stood, as `Loader.state_dict` says it.
        nodes: Bytes and checksum of each node's file.
        figures: Of the running epoch so far, of all ranks; see `figures.summarise`.
    """

    path: Path
    state: dict[str, Any]
    nodes: list[tuple[int, str]]
    figures: dict[str, float]


def save_snapshot(
    path: Path,
    state: dict[str, object],
    node: NodeSnapshot,
    world: World,
    *,
    figures: Mapping[str, float] | None = None,
) -> None:
    """Write a directory that all nodes can read. Collective; replaces an older one when whole.

    Raises:
        StateError: If something else lies there, or it cannot be written; on all ranks.
    """
    with replacing(path, world) as directory:

        def write_part() -> bytes:
            if world.local_rank:
                return b""
            file = _node_file(directory, world.node)
            with named(path):
                write_table(file, _to_table(node))
                with open(file, "rb") as written:
                    num_bytes = written.seek(-SUM_BYTES, os.SEEK_END) + SUM_BYTES
                    return json.dumps([num_bytes, written.read().hex()]).encode()

        def write_state() -> None:
            with named(path):
                nodes = [json.loads(part) for part in parts if part]
                record = {"state": state, "nodes": nodes, "figures": dict(figures or {})}
                write_record(directory / STATE, record)

        # Ranks are numbered node by node
        parts = agree(world, write_part, doing="save every node")
        together(world, lambda: write_state() if world.rank == 0 else None, doing="save the state")


def find_snapshot(path: Path) -> Path:
    """Find the newest whole directory: ``path``, or the one before it after a kill.

    Raises:
        StateError: If neither is there.
    """
    return find_save(path, STATE)


def load_state(path: Path) -> Saved:
    """Read the small part.

    Args:
        path: What `find_snapshot` found.

    Raises:
        StateError: If it is missing or damaged.
    """
    record = read_saved(path / STATE)
    try:
        nodes = [(int(num_bytes), str(checksum)) for num_bytes, checksum in record["nodes"]]
        return Saved(path, dict(record["state"]), nodes, dict(record["figures"]))
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"{path / STATE}: says something else than expected ({error!r}), as another version of "
            f"Tonari may have written; {CURE}"
        ) from error


def find_state(path: Path, world: World) -> Saved:
    """Find a save and read its small part on rank 0, for all ranks alike. Collective.

    Raises:
        StateError: On all ranks, if nothing was saved there, or it is damaged.
    """

    def find() -> bytes:
        if world.rank:
            return b""
        found = load_state(find_snapshot(path))
        return json.dumps([found.path.name, found.state, found.nodes, found.figures]).encode()

    path = path.resolve()
    name, state, nodes, figures = json.loads(agree(world, find, doing="find what was saved")[0])
    nodes = [(num_bytes, checksum) for num_bytes, checksum in nodes]
    return Saved(path.with_name(name), state, nodes, figures)


def load_node(saved: Saved, node: int, dtype: np.dtype[np.void]) -> NodeSnapshot:
    """Read one node's part; of the scores the columns of ``dtype``, as far as they were saved.

    Raises:
        StateError: If it is missing, damaged, or of another save.
    """
    return _from_rows(*_read_rows(saved, node, dtype))


def load_samples(
    saved: Saved,
    sample_id: NDArray[np.int64],
    dtype: np.dtype[np.void],
    *,
    world: World,
    num_samples: int,
    tag: int,
) -> NodeSnapshot:
    """Read what any node saved of some samples, as another layout needs it. Collective.

    Each file is read by one rank, and a lap reads one file on every rank: memory stays small.

    Args:
        saved: What was saved.
        sample_id: int64[num_slots]: The samples, slot by slot.
        dtype: The score columns that are wanted.
        world: All ranks.
        num_samples: Of the dataset.
        tag: Of the messages.

    Raises:
        StateError: On all ranks, if any part is missing, damaged, or of another save.
    """
    num_nodes, size = len(saved.nodes), world.world_size
    mine = range(world.rank, num_nodes, size)
    return share_samples(
        [(node, partial(_read_rows, saved, node, dtype)) for node in mine], sample_id, dtype,
        num_parts=num_nodes, num_laps=-(-num_nodes // size), world=world,
        num_samples=num_samples, tag=tag,
    )  # fmt: skip


def share_samples(
    given: Sequence[tuple[int, Callable[[], Part]]],
    sample_id: NDArray[np.int64],
    dtype: np.dtype[np.void],
    *,
    num_parts: int,
    num_laps: int,
    world: World,
    num_samples: int,
    tag: int,
) -> NodeSnapshot:
    """Bring what ranks know of samples to those that need it. Collective.

    Rows go by way of the ranks that keep the index of their samples. Where several parts have a
    row, as where every node holds all, the report of the latest epoch counts.

    Args:
        given: The number of each part that this rank gives, and what reads it.
        sample_id: int64[num_slots]: The samples that it needs, slot by slot.
        dtype: The score columns that are wanted.
        num_parts: Of all ranks.
        num_laps: Parts of the rank that gives most.
        world: All ranks.
        num_samples: Of the dataset.
        tag: Of the messages.

    Raises:
        StateError: On all ranks, if any part cannot be read.
    """
    rank, size = world.rank, world.world_size
    first, stop = (-(-part * num_samples // size) for part in (rank, rank + 1))
    index = _unsaved(np.arange(first, stop), dtype)
    meta: dict[str, Any] = {}
    for lap in range(num_laps):
        rows = index[:0]
        mine = given[lap : lap + 1]
        read = together(world, partial(_read_each, mine), doing="read what was saved")
        if read:
            rows, meta = read[0]
            _take_turns(rows, mine[0][0], num_parts)
        order = np.argsort(rows["sample_id"], kind="stable")
        leaving = by_keeper(world, rows["sample_id"][order], num_samples, rows[order])
        for theirs in all_to_all(world, leaving, tag=tag, doing="send what was saved"):
            _take_in(index, theirs, first)
    order = np.argsort(sample_id, kind="stable")
    asking = by_keeper(world, sample_id[order], num_samples, sample_id[order])
    asked = all_to_all(world, asking, tag=tag, doing="ask for what was saved")
    answers = [index[ids - first] for ids in asked]
    answered = all_to_all(world, answers, tag=tag, doing="answer what was saved")
    ours = np.empty(len(sample_id), index.dtype)
    ours[order] = np.concatenate(answered)
    all_meta = map(
        json.loads, world.allgather(json.dumps(meta).encode(), doing="send what was selected")
    )
    return _from_rows(ours, next(filter(None, all_meta)))


def load_scores(path: Path) -> Scores:
    """Read the scores of all samples, in the columns that were saved.

    Where every node holds all rows, the report of the latest epoch counts.

    Args:
        path: What `find_snapshot` found.

    Returns:
        scores[num_samples]: By sample_id.

    Raises:
        StateError: If a part is missing or damaged.
    """
    saved = load_state(path)
    scores = unscored(0, score_dtype(()))
    for node in range(len(saved.nodes)):
        table = _read_table(saved, node)
        if node == 0:
            names = [name for name in COLUMNS if name in table.column_names]
            scores = unscored(saved.state["num_samples"], score_dtype(names))
        found = {name: _column(table, name) for name in scores.dtype.names or ()}
        places = table.column("sample_id").to_numpy()
        newer = found["epoch"] >= scores["epoch"][places]
        for name, values in found.items():
            scores[name][places[newer]] = values[newer]
    return scores


def load_history(path: Path, sample_id: NDArray[np.int64]) -> Scores | None:
    """Read the losses of some samples in the epochs that a save remembers.

    Args:
        path: What `find_snapshot` found.
        sample_id: int64[n]: Distinct, ascending.

    Returns:
        scores[n], with the column ``history``; None: it was not kept.

    Raises:
        StateError: If a part is missing or damaged.
    """
    saved = load_state(path)
    scores = unscored(len(sample_id), score_dtype(["history"]))
    for node in range(len(saved.nodes)):
        table = _read_table(saved, node)
        if "history" not in table.column_names:
            return None
        held = table.column("sample_id").to_numpy()
        rows = np.flatnonzero(np.isin(held, sample_id))
        places = np.searchsorted(sample_id, held[rows])
        newer = table.column("epoch").to_numpy()[rows] >= scores["epoch"][places]
        for name in scores.dtype.names or ():
            scores[name][places[newer]] = _column(table, name)[rows[newer]]
    return scores


def _unsaved(sample_id: NDArray[np.int64], dtype: np.dtype[np.void]) -> NDArray[np.void]:
    rows = np.zeros(len(sample_id), _row_dtype(dtype))
    rows["scores"] = unscored(len(rows), dtype)
    rows["hidden_place"], rows["weight"], rows["count"] = -1, 1, 1
    rows["sample_id"] = sample_id
    return rows


def _take_turns(rows: NDArray[np.void], node: int, num_nodes: int) -> None:
    """Let hidden rows keep their order within a node, and nodes take turns."""
    place = rows["hidden_place"]
    rows["hidden_place"] = np.where(place >= 0, place * num_nodes + node, -1)


def _take_in(index: NDArray[np.void], theirs: NDArray[np.void], first: int) -> None:
    """Put rows into the index of samples from ``first`` on; a newer score stays."""
    places, found = theirs["sample_id"] - first, theirs.copy()
    older = found["scores"]["epoch"] < index["scores"]["epoch"][places]
    found["scores"][older] = index["scores"][places][older]
    index[places] = found


def _read_each(parts: Sequence[tuple[int, Callable[[], Part]]]) -> list[Part]:
    return [read() for _, read in parts]


def _read_rows(saved: Saved, node: int, dtype: np.dtype[np.void]) -> Part:
    table = _read_table(saved, node)
    rows = np.zeros(table.num_rows, _row_dtype(dtype))
    rows["scores"] = unscored(len(rows), dtype)
    for name in ("sample_id", "hidden_place", "weight"):
        rows[name] = table.column(name).to_numpy()
    trained = table.column("trained").to_numpy()
    rows["count"], rows["before"], rows["now"] = 1, trained == 1, trained == 2
    for name in COUNTS:
        if name in table.column_names:
            rows[name] = table.column(name).to_numpy()
    for name in set(dtype.names or ()).intersection(table.column_names):
        rows["scores"][name] = _column(table, name)
    return rows, json.loads(table.schema.metadata[b"selection"])


def _read_table(saved: Saved, node: int) -> pa.Table:
    """Read a node's file of this very save.

    Raises:
        StateError: If it is missing, damaged, or of another one.
    """
    file = _node_file(saved.path, node)
    try:
        data = file.read_bytes()
        table = parse_table(file, data)
    except (OSError, DamagedFileError) as error:
        raise lost(file, error) from error
    found, expected = (len(data), data[-SUM_BYTES:].hex()), saved.nodes[node]
    if found != expected:
        raise StateError(
            f"{file}: {found[0]} bytes with checksum {found[1]}, is not the one that {STATE} was "
            f"saved with, of {expected[0]} bytes with {expected[1]}; {CURE}"
        )
    return table


def _from_rows(rows: NDArray[np.void], meta: dict[str, Any]) -> NodeSnapshot:
    place = rows["hidden_place"]
    order = np.argsort(place, kind="stable")
    hidden = order[place[order] >= 0]
    weights = rows["weight"].copy() if meta["weighted"] else None
    counts = rows["count"].copy() if meta.get("counted") else None
    selection = Selection(
        hidden, weights, meta["lr_factor"], meta["top_up"], meta["figures"], counts
    )
    return NodeSnapshot(
        rows["sample_id"].copy(),
        rows["scores"].copy(),
        selection,
        rows["before"].copy(),
        rows["now"].copy(),
    )


def rows_of(node: NodeSnapshot) -> Part:
    """Say of a node's rows in memory what a file would."""
    rows = np.zeros(len(node.sample_id), _row_dtype(node.scores.dtype))
    rows["sample_id"], rows["scores"], rows["weight"], rows["count"] = (
        node.sample_id, node.scores, 1, 1,
    )  # fmt: skip
    rows["hidden_place"] = _hidden_places(node)
    if node.selection.weights is not None:
        rows["weight"] = node.selection.weights
    if node.selection.counts is not None:
        rows["count"] = node.selection.counts
    rows["before"], rows["now"] = node.before, node.now
    return rows, _meta_of(node.selection)


def _hidden_places(node: NodeSnapshot) -> NDArray[np.int64]:
    place = np.full(len(node.sample_id), -1, np.int64)
    place[node.selection.hidden] = np.arange(len(node.selection.hidden))
    return place


def _meta_of(selection: Selection) -> dict[str, Any]:
    meta = {
        "weighted": selection.weights is not None,
        "lr_factor": selection.lr_factor,
        "top_up": selection.top_up,
        "figures": dict(selection.figures),
    }
    return meta if selection.counts is None else {**meta, "counted": True}


def _to_table(node: NodeSnapshot) -> pa.Table:
    place, weights = _hidden_places(node), node.selection.weights
    columns: dict[str, NDArray[np.generic] | pa.Array] = {
        "sample_id": node.sample_id, "hidden_place": place,
    }  # fmt: skip
    kept = node.scores.dtype.names or ()
    columns |= {name: _array(node.scores[name]) for name in kept}
    columns["weight"] = np.ones(len(place), np.float32) if weights is None else weights
    columns["trained"] = np.where(node.now > 0, 2, node.before > 0).astype(np.uint8)
    if node.selection.counts is not None:
        columns |= zip(COUNTS, (node.selection.counts, node.before, node.now), strict=True)
    selection = json.dumps(_meta_of(node.selection))
    return pa.table(columns).replace_schema_metadata({"selection": selection})


def _array(values: NDArray[np.generic]) -> NDArray[np.generic] | pa.Array:
    """Lay out a column of scores for a table; of several values a row as lists."""
    whole = np.ascontiguousarray(values)
    if whole.ndim == 1:
        return whole
    return pa.FixedSizeListArray.from_arrays(pa.array(whole.reshape(-1)), whole.shape[1])


def _column(table: pa.Table, name: str) -> NDArray[np.generic]:
    """Read a column of scores; the inverse of `_array`."""
    column, width = table.column(name), -1
    if pa.types.is_fixed_size_list(column.type):
        column, width = column.combine_chunks().flatten(), column.type.list_size
    values: NDArray[np.generic] = column.to_numpy()
    return values if width < 0 else values.reshape(-1, width)


def _node_file(path: Path, node: int) -> Path:
    return path / f"node-{node}.arrow"
