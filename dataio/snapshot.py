"""A loader's state on disk: a small JSON file, and each node's scores as an Arrow table.

The directory appears whole or not at all; the one it replaces stays until then.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataio.atomic import read_table, sync_directory, write_json, write_table
from dataio.directory import all_to_all, by_books
from dataio.errors import StateError
from dataio.history import COLUMNS, Scores, score_dtype, unscored
from dataio.policies import Selection
from dataio.stretch import Position
from dataio.world import World


def _row_dtype(scores: np.dtype[np.void]) -> np.dtype[np.void]:
    fields = [
        ("sample_id", "<i8"),
        ("hidden_place", "<i8"),
        ("weight", "<f4"),
        ("trained", "u1"),
        ("scores", scores),
        ("begun_loss", "<f4"),
    ]
    return np.dtype(fields)


@dataclass(frozen=True)
class NodeSnapshot:
    """What one node saves.

    Attributes:
        sample_id: int64[num_slots]: For the check that a row gets its own score.
        scores: scores[num_slots].
        selection: The running epoch's choice, after topping up.
        trained: uint8[num_slots]: 0 not yet in this epoch, 1 before the running stretch, 2 in it.
        losses: float32[num_slots]: Last losses when the epoch began, where they decide of its
            exchange.
    """

    sample_id: NDArray[np.int64]
    scores: Scores
    selection: Selection
    trained: NDArray[np.uint8]
    losses: NDArray[np.float32] | None = None


def save_snapshot(path: Path, state: dict[str, object], node: NodeSnapshot, world: World) -> None:
    """Write a directory that all nodes can read. Collective; replaces ``path`` when whole.

    Raises:
        StateError: If it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    if world.rank == 0:
        with named(path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    world.barrier(doing="begin to save")
    if world.local_rank == 0:
        with named(path):
            write_table(_node_file(partial, world.node), _to_table(node))
    world.barrier(doing="save every node")
    if world.rank == 0:
        with named(path):
            write_json(partial / "state.json", state)
            replace_directory(partial, path)
    world.barrier(doing="finish saving")


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Make an error of writing one that names the directory.

    Raises:
        StateError: If something in it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path}: the loader's state cannot be written ({error}), what was saved before is "
            f"still whole; free some space, or give a directory that can be written and that "
            f"every node sees"
        ) from error


def replace_directory(partial: Path, path: Path) -> None:
    """Put a whole directory in the place of an older one, which stays beside it until then."""
    older = previous(path)
    if path.exists():
        shutil.rmtree(older, ignore_errors=True)
        os.replace(path, older)
    os.replace(partial, path)
    sync_directory(path.parent)
    shutil.rmtree(older, ignore_errors=True)


def previous(path: Path) -> Path:
    """Name the directory that a kill may have left in place of ``path``."""
    return path.with_name(path.name + ".previous")


def find_snapshot(path: Path) -> Path:
    """Find the newest whole directory: ``path``, or the one before it after a kill.

    Raises:
        StateError: If neither is there.
    """
    for candidate in (path, previous(path)):
        if (candidate / "state.json").exists():
            return candidate
    raise StateError(
        f"{path}: no saved loader state here (state.json is missing); give the directory that "
        f"loader.save wrote, on a filesystem that every node sees"
    )


def load_state(path: Path) -> dict[str, object]:
    """Read the small part."""
    state: dict[str, object] = json.loads((path / "state.json").read_text())
    return state


def load_node(path: Path, node: int, dtype: np.dtype[np.void]) -> NodeSnapshot:
    """Read one node's part; of the scores the columns of ``dtype``, as far as they were saved."""
    return _from_rows(*_read_rows(path, node, dtype))


def load_samples(
    path: Path,
    num_nodes: int,
    sample_id: NDArray[np.int64],
    dtype: np.dtype[np.void],
    *,
    world: World,
    num_samples: int,
    tag: int,
) -> NodeSnapshot:
    """Read what any node saved of some samples, as another layout needs it. Collective.

    Each file is read by one rank; its rows go by way of the ranks that keep the books of their
    samples. Where every node holds all rows, the report of the latest epoch counts.

    Args:
        path: The directory.
        num_nodes: Nodes that saved.
        sample_id: int64[num_slots]: The samples, slot by slot.
        dtype: The score columns that are wanted.
        world: All ranks.
        num_samples: Of the dataset.
        tag: Of the messages.
    """
    rank, size = world.rank, world.world_size
    first, stop = (-(-book * num_samples // size) for book in (rank, rank + 1))
    books = _unsaved(np.arange(first, stop), dtype)
    meta: dict[str, Any] = {}
    # A lap reads one file on every rank: in the order of the files, and memory stays small.
    for lap in range(0, num_nodes, size):
        node = lap + rank
        rows = books[:0]
        if node < num_nodes:
            rows, meta = _read_rows(path, node, dtype)
            _take_turns(rows, node, num_nodes)
        order = np.argsort(rows["sample_id"], kind="stable")
        leaving = by_books(world, rows["sample_id"][order], num_samples, rows[order])
        for theirs in all_to_all(world, leaving, tag=tag, doing="tell what was saved"):
            _take_in(books, theirs, first)
    order = np.argsort(sample_id, kind="stable")
    asking = by_books(world, sample_id[order], num_samples, sample_id[order])
    asked = all_to_all(world, asking, tag=tag, doing="ask for what was saved")
    answers = [books[ids - first] for ids in asked]
    found = all_to_all(world, answers, tag=tag, doing="answer what was saved")
    mine = np.empty(len(sample_id), books.dtype)
    mine[order] = np.concatenate(found)
    # Any file's: rank 0 has read one.
    told = world.allgather(json.dumps(meta).encode(), doing="tell what was selected")
    return _from_rows(mine, json.loads(told[0]))


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
    try:
        state: dict[str, Any] = load_state(path)
        num_nodes = len(Position.from_json(state).running.replicas)
        books = unscored(0, score_dtype(()))
        for node in range(num_nodes):
            table = read_table(_node_file(path, node))
            if node == 0:
                names = [name for name in COLUMNS if name in table.column_names]
                books = unscored(state["num_samples"], score_dtype(names))
            found = {name: table.column(name).to_numpy() for name in books.dtype.names or ()}
            places = table.column("sample_id").to_numpy()
            newer = found["epoch"] >= books["epoch"][places]
            for name, values in found.items():
                books[name][places[newer]] = values[newer]
    except (OSError, KeyError, IndexError, TypeError, ValueError, pa.ArrowException) as error:
        raise StateError(
            f"{path}: the saved scores cannot be read ({type(error).__name__}: {error}), expected "
            "what loader.save wrote, of every node; give an older one, or save again"
        ) from error
    return books


def _unsaved(sample_id: NDArray[np.int64], dtype: np.dtype[np.void]) -> NDArray[np.void]:
    rows = np.zeros(len(sample_id), _row_dtype(dtype))
    rows["scores"] = unscored(len(rows), dtype)
    rows["hidden_place"], rows["weight"], rows["begun_loss"] = -1, 1, np.inf
    rows["sample_id"] = sample_id
    return rows


def _take_turns(rows: NDArray[np.void], node: int, num_nodes: int) -> None:
    """Let hidden rows keep their order within a node, and nodes take turns."""
    place = rows["hidden_place"]
    rows["hidden_place"] = np.where(place >= 0, place * num_nodes + node, -1)


def _take_in(books: NDArray[np.void], theirs: NDArray[np.void], first: int) -> None:
    """Put rows into the books of samples from ``first`` on; a newer score stays."""
    places, found = theirs["sample_id"] - first, theirs.copy()
    older = found["scores"]["epoch"] < books["scores"]["epoch"][places]
    found["scores"][older] = books["scores"][places][older]
    books[places] = found


def _read_rows(
    path: Path, node: int, dtype: np.dtype[np.void]
) -> tuple[NDArray[np.void], dict[str, Any]]:
    table = read_table(_node_file(path, node))
    rows = np.zeros(table.num_rows, _row_dtype(dtype))
    rows["scores"] = unscored(len(rows), dtype)
    for name in ("sample_id", "hidden_place", "weight", "trained"):
        rows[name] = table.column(name).to_numpy()
    if "begun_loss" in table.column_names:
        rows["begun_loss"] = table.column("begun_loss").to_numpy()
    for name in set(dtype.names or ()).intersection(table.column_names):
        rows["scores"][name] = table.column(name).to_numpy()
    return rows, json.loads(table.schema.metadata[b"selection"])


def _from_rows(rows: NDArray[np.void], meta: dict[str, Any]) -> NodeSnapshot:
    place = rows["hidden_place"]
    order = np.argsort(place, kind="stable")
    hidden = order[place[order] >= 0]
    weights = rows["weight"].copy() if meta["weighted"] else None
    selection = Selection(hidden, weights, meta["lr_factor"], meta["top_up"], meta["figures"])
    return NodeSnapshot(
        rows["sample_id"].copy(),
        rows["scores"].copy(),
        selection,
        rows["trained"].copy(),
        rows["begun_loss"].copy() if meta.get("losses") else None,
    )


def _to_table(node: NodeSnapshot) -> pa.Table:
    place = np.full(len(node.sample_id), -1, np.int64)
    place[node.selection.hidden] = np.arange(len(node.selection.hidden))
    weights = node.selection.weights
    columns: dict[str, NDArray[np.generic]] = {"sample_id": node.sample_id, "hidden_place": place}
    kept = node.scores.dtype.names or ()
    columns |= {name: np.ascontiguousarray(node.scores[name]) for name in kept}
    columns["weight"] = np.ones(len(place), np.float32) if weights is None else weights
    columns["trained"] = node.trained
    if node.losses is not None:
        columns["begun_loss"] = node.losses
    meta = {
        "weighted": weights is not None,
        "lr_factor": node.selection.lr_factor,
        "top_up": node.selection.top_up,
        "figures": dict(node.selection.figures),
        "losses": node.losses is not None,
    }
    return pa.table(columns).replace_schema_metadata({"selection": json.dumps(meta)})


def _node_file(path: Path, node: int) -> Path:
    return path / f"node-{node}.arrow"
