"""Go on from a saved state: find the position in it, and this node's part, on any ranks."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import StateError
from dataio.base.seeding import ORDER_VERSION, digest
from dataio.plan.layout import Layout
from dataio.plan.policies import Shuffle
from dataio.plan.segment import Position, Segment
from dataio.state.snapshot import NodeSnapshot, Saved, load_node, load_samples
from dataio.world import World
from dataio.world.agree import together

STATE_VERSION = 3

log = logging.getLogger(__name__)


def sign(state: Mapping[str, object]) -> dict[str, object]:
    """Give a state its checksum."""
    return {**state, "checksum": _checksum(state)}


def check_signed(state: Mapping[str, object]) -> None:
    """Refuse a state in which anything is other than `sign` was given it.

    Raises:
        StateError: If it does not match its checksum.
    """
    rest = {name: value for name, value in state.items() if name != "checksum"}
    said = state.get("checksum")
    try:
        found = _checksum(rest)
    except (TypeError, ValueError) as error:
        found = f"none ({error})"
    if found != said:
        raise StateError(
            f"checkpoint: the state has the checksum {found}, but says {said}; give it as "
            "state_dict gave it, from an older checkpoint if this one is damaged"
        )


def _checksum(state: Mapping[str, object]) -> str:
    return digest(json.dumps(state, sort_keys=True))


@dataclass(frozen=True)
class RunIdentity:
    """What a run keeps, whoever goes on with it.

    Attributes:
        seed: Of every random choice.
        num_samples: Of the dataset.
        shuffle: Which node holds which row.
        shards: Digest of the shards that hold them, of a dataset that grows; "" of others.
        fingerprint: Of the files of a dataset that does not grow. Others may hold the same samples.
    """

    seed: int
    num_samples: int
    shuffle: Shuffle
    shards: str = ""
    fingerprint: str = ""

    def to_json(self) -> dict[str, object]:
        """For `state_dict`."""
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "shuffle": digest(repr(self.shuffle)),
            **({"shards": self.shards} if self.shards else {}),
        }

    def to_state(
        self,
        position: Position,
        *,
        num_hidden: int | None,
        rows: tuple[str, int, int] | None = None,
    ) -> dict[str, object]:
        """Make what `state_dict` gives.

        Args:
            position: Where the loader stands.
            num_hidden: Rows that the epoch hides on all nodes; None: not known.
            rows: Its place in the log of rows; None: there is none.
        """
        known: dict[str, object] = {} if num_hidden is None else {"hidden": num_hidden}
        if self.fingerprint:
            known["fingerprint"] = self.fingerprint
        if rows is not None:
            known["rows"] = list(rows)
        return sign({**self.to_json(), **position.to_json(), **known})

    def find_position(
        self, state: dict[str, object], *, layout: Layout, batch_size: int, excluded: str = ""
    ) -> Position:
        """Find where to go on from a saved state, under this layout, batch size and list.

        Raises:
            StateError: If it is of another run, or damaged.
        """
        for name, mine in self.to_json().items():
            if state.get(name) != mine:
                raise StateError(
                    f"checkpoint: {name} is {state.get(name)}, this loader has {mine}; make "
                    f"the loader as it was when the checkpoint was written"
                )
        check_signed(state)
        position = Position.from_json(state)
        same = self._has_same_steps(position.running, layout, batch_size)
        return position.resumed(layout.replicas, batch_size, excluded=excluded, same_steps=same)

    def warn_of_other_files(self, state: Mapping[str, object]) -> None:
        """Log it where the dataset's files are not those of a saved state."""
        before = state.get("fingerprint", self.fingerprint)
        if before != self.fingerprint:
            log.warning(
                "[rank 0] checkpoint: the dataset's files had the fingerprint %s when it was "
                "written, and have %s now; that is right if they were only copied, or a shard is "
                "excluded that is missing; if samples were changed or put elsewhere among them, "
                "begin anew, as places and scores are those of other samples",
                before, self.fingerprint,
            )  # fmt: skip

    def _has_same_steps(self, old: Segment, layout: Layout, batch_size: int) -> bool:
        """Whether every step trains what it would have under the saved layout, dealt otherwise."""
        before = old.layout(self.num_samples)
        mine = np.array(layout.replicas) * batch_size
        theirs = np.array(old.replicas) * old.batch_size
        if self.shuffle.holds_all:
            return int(mine.sum()) == int(theirs.sum())
        moves = self.shuffle.num_leaving(before) + self.shuffle.num_leaving(layout) > 0
        # Of each number of samples that the dataset had, as a slot's row follows from all of them.
        same_pools = all(
            np.array_equal(
                Layout(old.replicas, num_samples).pool_sizes,
                Layout(layout.replicas, num_samples).pool_sizes,
            )
            for num_samples in {self.num_samples, *dict(old.grown).values()}
        )
        return same_pools and not moves and np.array_equal(mine, theirs)


def check_excluded(position: Position, excluded: str) -> None:
    """Refuse to go on without a save amid an epoch of which a part left out what nobody knows.

    Args:
        position: Where this loader goes on.
        excluded: Name of its list.

    Raises:
        StateError: If an ended segment had a list that is not this one.
    """
    if any(segment.excluded not in ("", excluded) for segment in position.ended):
        raise StateError(
            f"checkpoint: epoch {position.epoch} was begun with another list to exclude, and "
            "state_dict does not say which samples it had; use loader.save and loader.restore, or "
            "give the list as it was until the epoch ends"
        )


def find_num_hidden(state: Mapping[str, object], position: Position, *, hides: bool) -> int | None:
    """Read how many rows the epoch of a `state_dict` hides; None: it does not say.

    Args:
        state: What `state_dict` gave.
        position: Where this loader goes on from it.
        hides: Whether this loader has a policy, which may hide rows.

    Raises:
        StateError: If the rest of the epoch cannot be dealt anew without knowing which rows.
    """
    hidden = state.get("hidden")
    if position.ended and (hidden or hides):
        raise StateError(
            f"checkpoint: epoch {position.epoch} was begun on other ranks or with another "
            "batch size, and state_dict does not say which rows it hid; use loader.save and "
            "loader.restore"
        )
    return hidden if isinstance(hidden, int) else None


def warn_without_scores(position: Position, num_hidden: int | None, *, rank: int) -> None:
    """Say what it means to go on without scores, where a policy goes by them."""
    log.warning(
        "[rank %d] load_state_dict: the score history is not part of state_dict, so the "
        "hidden rows start anew%s; use loader.save and loader.restore to keep them",
        rank,
        ", and what is left of this epoch skips some samples and repeats others"
        if num_hidden and position.running.steps
        else "",
    )


def check_num_hidden(position: Position, hid: int | None, hides: int) -> None:
    """Refuse to go on amid an epoch that hid other rows than it does now.

    Args:
        position: Where the epoch goes on.
        hid: Rows that it hid when its state was taken; None: nobody said.
        hides: Rows that it hides now.

    Raises:
        StateError: If the numbers differ.
    """
    if hid in (None, hides) or not position.running.steps:
        return
    raise StateError(
        f"checkpoint: epoch {position.epoch} hides {hid} rows, with the importance of this "
        f"loader {hides}, so samples would be skipped or repeated; make the loader as it was "
        "when the checkpoint was written"
    )


def trained_before(position: Position, node: NodeSnapshot) -> NDArray[np.int64]:
    """int64[num_slots]: How often a save says that the ended segments of its epoch trained each."""
    # Restored into the segment that it was saved in, its own rows are still to be counted.
    return node.before if position.running.steps else node.before + node.now


def load_part(
    saved: Saved,
    wanted: NDArray[np.int64],
    dtype: np.dtype[np.void],
    *,
    layout: Layout,
    world: World,
    tag: int,
) -> NodeSnapshot:
    """Read what a save says of this node's rows. Collective.

    Args:
        saved: What was saved.
        wanted: int64[num_slots]: The node's samples.
        dtype: The score columns that are wanted.
        layout: The layout now.
        world: All ranks.
        tag: Of messages.

    Raises:
        StateError: On all ranks, if any of their parts is missing or damaged.
    """
    if Position.from_json(saved.state).running.replicas == layout.replicas:
        return together(
            world, lambda: load_node(saved, world.node, dtype), doing="read what was saved"
        )
    return load_samples(saved, wanted, dtype, world=world, num_samples=layout.num_samples, tag=tag)
