"""Two loaders of one replica, of its inputs and of its targets: they wait for each other's rows."""

import json
import math

import numpy as np

import dataio
from dataio.world import World
from tonari.trainer.deliver.relay import hash_of
from tonari.trainer.errors import DeliveryError


def meet(loader: dataio.Loader, *, world: World, other: int, tag: int) -> None:
    """Wait, however long it stages, for the other loader of a replica. Blocks.

    Args:
        loader: This rank's.
        world: All ranks.
        other: The rank that has the other; it calls this too.
        tag: Of the messages between the two.

    Raises:
        DeliveryError: If the two do not stand at the same place of the same run.
    """
    # One of the two logs which rows are trained, and its checksum is of that too
    own = ("rows", "checksum")
    place = {name: value for name, value in loader.state_dict().items() if name not in own}
    state = json.dumps(place, sort_keys=True).encode()
    mine = np.array([hash_of(np.frombuffer(state, np.uint8))], np.int64)
    theirs = np.zeros_like(mine)
    requests = [
        world.isend(mine.view(np.uint8), dest=other, tag=tag),
        world.irecv(theirs.view(np.uint8), source=other, tag=tag),
    ]
    doing = "waiting for the rows of a replica's other stage"
    world.wait(requests, peers=[other, other], doing=doing, timeout_s=math.inf)
    if mine != theirs:
        raise DeliveryError(
            f"[rank {world.rank}] its loader stands at {state.decode()}, that of rank {other} "
            "elsewhere, expected the same of the two ranks that read a replica's rows; give both "
            "nodes the same dataset, settings and checkpoint"
        )
