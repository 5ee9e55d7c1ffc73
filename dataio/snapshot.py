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
from dataio.errors import StateError
from dataio.policies import SCORE_DTYPE, Scores, Selection
from dataio.scores import unscored
from dataio.world import World

ROW_DTYPE = np.dtype(
    [
        ("sample_id", "<i8"),
        ("hidden_place", "<i8"),
        ("weight", "<f4"),
        ("trained", "u1"),
        ("scores", SCORE_DTYPE),
        ("begun_loss", "<f4"),
    ]
)


@dataclass(frozen=True)
class NodeSnapshot:
    """What one node saves.

    Attributes:
        sample_id: int64[num_slots]: For the check that a row gets its own score.
        scores: SCORE_DTYPE[num_slots].
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
        with _named(path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    world.barrier(doing="begin to save")
    if world.local_rank == 0:
        with _named(path):
            write_table(_node_file(partial, world.node), _to_table(node))
    world.barrier(doing="save every node")
    if world.rank == 0:
        with _named(path):
            write_json(partial / "state.json", state)
            _replace(partial, path)
    world.barrier(doing="finish saving")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path}: the loader's state cannot be written ({error}), what was saved before is "
            f"still whole; free some space, or give a directory that can be written and that "
            f"every node sees"
        ) from error


def _replace(partial: Path, path: Path) -> None:
    older = _previous(path)
    if path.exists():
        shutil.rmtree(older, ignore_errors=True)
        os.replace(path, older)
    os.replace(partial, path)
    sync_directory(path.parent)
    shutil.rmtree(older, ignore_errors=True)


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def find_snapshot(path: Path) -> Path:
    """Find the newest whole directory: ``path``, or the one before it after a kill.

    Raises:
        StateError: If neither is there.
    """
    for candidate in (path, _previous(path)):
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


def load_node(path: Path, node: int) -> NodeSnapshot:
    """Read one node's part."""
    return _from_rows(*_read_rows(path, node))


def load_samples(path: Path, num_nodes: int, sample_id: NDArray[np.int64]) -> NodeSnapshot:
    """Read what any node saved of some samples, as another layout needs it.

    Where every node holds all rows, the report of the latest epoch counts. Reads every node's file.

    Args:
        path: The directory.
        num_nodes: Nodes that saved.
        sample_id: int64[num_slots]: The samples, slot by slot.
    """
    order = np.argsort(sample_id, kind="stable")
    rows = np.zeros(len(sample_id), ROW_DTYPE)
    rows["scores"] = unscored(len(sample_id))
    rows["hidden_place"], rows["weight"], rows["begun_loss"] = -1, 1, np.inf
    meta: dict[str, Any] = {}
    for node in range(num_nodes):
        theirs, meta = _read_rows(path, node)
        place = np.searchsorted(sample_id, theirs["sample_id"], sorter=order)
        slots = order[np.minimum(place, len(order) - 1)]
        wanted = np.flatnonzero(sample_id[slots] == theirs["sample_id"])
        slots, found = slots[wanted], theirs[wanted]
        # Hidden rows keep their order within a node; nodes take turns.
        found["hidden_place"] = np.where(
            found["hidden_place"] >= 0, found["hidden_place"] * num_nodes + node, -1
        )
        older = found["scores"]["epoch"] < rows["scores"]["epoch"][slots]
        found["scores"][older] = rows["scores"][slots][older]
        rows[slots] = found
    rows["sample_id"] = sample_id
    return _from_rows(rows, meta)


def _read_rows(path: Path, node: int) -> tuple[NDArray[np.void], dict[str, Any]]:
    table = read_table(_node_file(path, node))
    rows = np.zeros(table.num_rows, ROW_DTYPE)
    for name in ("sample_id", "hidden_place", "weight", "trained"):
        rows[name] = table.column(name).to_numpy()
    if "begun_loss" in table.column_names:
        rows["begun_loss"] = table.column("begun_loss").to_numpy()
    for name in SCORE_DTYPE.names or ():
        rows["scores"][name] = table.column(name).to_numpy()
    return rows, json.loads(table.schema.metadata[b"selection"])


def _from_rows(rows: NDArray[np.void], meta: dict[str, Any]) -> NodeSnapshot:
    place = rows["hidden_place"]
    order = np.argsort(place, kind="stable")
    hidden = order[place[order] >= 0]
    weights = rows["weight"].copy() if meta["weighted"] else None
    selection = Selection(hidden, weights, meta["lr_factor"], meta["top_up"])
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
    columns |= {name: np.ascontiguousarray(node.scores[name]) for name in SCORE_DTYPE.names or ()}
    columns["weight"] = np.ones(len(place), np.float32) if weights is None else weights
    columns["trained"] = node.trained
    if node.losses is not None:
        columns["begun_loss"] = node.losses
    meta = {
        "weighted": weights is not None,
        "lr_factor": node.selection.lr_factor,
        "top_up": node.selection.top_up,
        "losses": node.losses is not None,
    }
    return pa.table(columns).replace_schema_metadata({"selection": json.dumps(meta)})


def _node_file(path: Path, node: int) -> Path:
    return path / f"node-{node}.arrow"
