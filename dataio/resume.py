"""Go on from a saved state: find the position in it, and this node's part, on any ranks."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.digest import digest
from dataio.errors import StateError
from dataio.layout import Layout
from dataio.policies import Shuffle
from dataio.seeding import ORDER_VERSION
from dataio.snapshot import NodeSnapshot, load_node, load_samples
from dataio.stretch import Position, Stretch
from dataio.world import World

STATE_VERSION = 2


@dataclass(frozen=True)
class Run:
    """What a run keeps, whoever goes on with it.

    Attributes:
        seed: Of every random choice.
        num_samples: Of the dataset.
        shuffle: Which node holds which row.
    """

    seed: int
    num_samples: int
    shuffle: Shuffle

    def to_json(self) -> dict[str, object]:
        """For `state_dict`."""
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "shuffle": digest(repr(self.shuffle)),
        }

    def find_position(
        self, state: dict[str, object], *, layout: Layout, batch_size: int
    ) -> Position:
        """Find where to go on from a saved state, under this layout and batch size.

        Raises:
            StateError: If it is of another run.
        """
        for name, mine in self.to_json().items():
            if state.get(name) != mine:
                raise StateError(
                    f"checkpoint: {name} is {state.get(name)}, this loader has {mine}; make "
                    f"the loader as it was when the checkpoint was written"
                )
        position = Position.from_json(state)
        same = self._has_same_steps(position.running, layout, batch_size)
        return position.resumed(layout.replicas, batch_size, same_steps=same)

    def _has_same_steps(self, old: Stretch, layout: Layout, batch_size: int) -> bool:
        """Whether every step trains what it would have under the saved layout, dealt otherwise."""
        before = Layout(old.replicas, self.num_samples)
        mine = np.array(layout.replicas) * batch_size
        theirs = np.array(old.replicas) * old.batch_size
        if self.shuffle.holds_all:
            return int(mine.sum()) == int(theirs.sum())
        moves = self.shuffle.num_leaving(before) + self.shuffle.num_leaving(layout) > 0
        same_pools = np.array_equal(before.pool_sizes, layout.pool_sizes)
        return same_pools and not moves and np.array_equal(mine, theirs)


def load_part(
    path: Path,
    state: dict[str, object],
    wanted: NDArray[np.int64] | None,
    dtype: np.dtype[np.void],
    *,
    layout: Layout,
    world: World,
    tag: int,
) -> NodeSnapshot:
    """Read what a snapshot says of this node's rows. Collective where the layout is another.

    Args:
        path: The snapshot's directory.
        state: Its small part.
        wanted: int64[num_slots]: The node's samples; None where only the snapshot tells, which is
            of the same layout then.
        dtype: The score columns that are wanted.
        layout: The layout now.
        world: All ranks.
        tag: Of messages.
    """
    saved = Position.from_json(state).running.replicas
    if saved == layout.replicas:
        return load_node(path, world.node, dtype)
    assert wanted is not None, "another layout begins where its first placement is known"
    return load_samples(
        path, len(saved), wanted, dtype, world=world, num_samples=layout.num_samples, tag=tag
    )
