"""Use every verb of a discovered world; under torchrun the program makes torch's default group."""

import json
import os
import sys
from pathlib import Path

import numpy as np

from dataio.world import World, discover_world

NUM_LARGE_BYTES = 3_000_000


def pass_around(world: World) -> list[int]:
    """Send a large and two small arrays round the ring, received in another order than sent."""
    if world.world_size == 1:
        return []
    after, before = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    large = np.full(NUM_LARGE_BYTES, world.rank, np.uint8)
    small = [np.array([world.rank, number], np.uint8) for number in range(2)]
    first, second, got = np.empty(2, np.uint8), np.empty(2, np.uint8), np.empty_like(large)
    requests = [
        world.irecv(first, source=before, tag=2**20 - 1),
        world.irecv(second, source=before, tag=2**20 - 1),
        world.isend(large, dest=after, tag=0),
        world.isend(small[0], dest=after, tag=2**20 - 1),
        world.isend(small[1], dest=after, tag=2**20 - 1),
        world.irecv(got, source=before, tag=0),
    ]
    peers = [before, before, after, after, after, before]
    world.wait(requests, peers=peers, doing="passing rows around")
    return [*map(int, first), *map(int, second), int(got.min()), int(got.max())]


def main() -> None:
    uses_torch = "TORCHELASTIC_RUN_ID" in os.environ
    if uses_torch:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    with discover_world(timeout_s=60) as world:
        values = np.array([0.1 * (world.rank + 1), -world.rank], np.float64)
        report = {
            "rank": world.rank,
            "world_size": world.world_size,
            "node": world.node,
            "num_nodes": world.num_nodes,
            "local_rank": world.local_rank,
            "replicas_per_node": world.replicas_per_node,
            "ring": pass_around(world),
            "gathered": [
                part.decode() for part in world.allgather(b"x" * world.rank, doing="gathering")
            ],
            "array": world.allgather_array(values, doing="gathering scores").tolist(),
            "sum": world.allreduce(values, op="sum", doing="adding").tobytes().hex(),
            "max": world.allreduce(values, op="max", doing="comparing").tolist(),
            "mpi": "dataio.world.mpi" in sys.modules,
            "torch": "dataio.world.torch" in sys.modules,
        }
        world.barrier(doing="ending")
    Path(sys.argv[1], f"{report['rank']}.json").write_text(json.dumps(report))
    if uses_torch:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
