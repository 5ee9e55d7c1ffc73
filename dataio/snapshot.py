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

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataio.atomic import read_table, sync_directory, write_json, write_table
from dataio.errors import StateError
from dataio.policies import SCORE_DTYPE, Scores, Selection
from dataio.world import World


@dataclass(frozen=True)
class NodeSnapshot:
    """What one node saves.

    Attributes:
        sample_id: int64[num_slots]: For the check that a row gets its own score.
        scores: SCORE_DTYPE[num_slots].
        selection: The running epoch's choice, after topping up.
    """

    sample_id: NDArray[np.int64]
    scores: Scores
    selection: Selection


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
    table = read_table(_node_file(path, node))
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    scores = np.zeros(table.num_rows, SCORE_DTYPE)
    for name in SCORE_DTYPE.names or ():
        scores[name] = columns[name]
    place = columns["hidden_place"]
    order = np.argsort(place, kind="stable")
    hidden = order[place[order] >= 0]
    meta = json.loads(table.schema.metadata[b"selection"])
    weights = columns["weight"].copy() if meta["weighted"] else None
    selection = Selection(hidden, weights, meta["lr_factor"], meta["top_up"])
    return NodeSnapshot(columns["sample_id"], scores, selection)


def _to_table(node: NodeSnapshot) -> pa.Table:
    place = np.full(len(node.sample_id), -1, np.int64)
    place[node.selection.hidden] = np.arange(len(node.selection.hidden))
    weights = node.selection.weights
    columns: dict[str, NDArray[np.generic]] = {"sample_id": node.sample_id, "hidden_place": place}
    columns |= {name: np.ascontiguousarray(node.scores[name]) for name in SCORE_DTYPE.names or ()}
    columns["weight"] = np.ones(len(place), np.float32) if weights is None else weights
    meta = {
        "weighted": weights is not None,
        "lr_factor": node.selection.lr_factor,
        "top_up": node.selection.top_up,
    }
    return pa.table(columns).replace_schema_metadata({"selection": json.dumps(meta)})


def _node_file(path: Path, node: int) -> Path:
    return path / f"node-{node}.arrow"
