"""Carry rows round the ring by one driver; the last argument says who falls silent, if anyone.

Arguments: report directory, "thread" or "polling", "none" or "silent".
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from dataio.base.errors import StallError
from dataio.exchange.transfer import Transfer
from dataio.rows.parcel import Parcel
from dataio.world import World, discover_world
from tests.row_store import MemoryStore

ROWS, PARCELS = 4000, 20


def carry(world: World, driver: str, *, silent: bool) -> dict[str, object]:
    """Exchange between steps that are collectives themselves, as a training step is."""
    after, before = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    store = MemoryStore(ROWS * world.rank, ROWS)
    parts = np.array_split(np.arange(ROWS), PARCELS)
    sends, receives = (
        [Parcel(part, peer, number, number) for number, part in enumerate(parts)]
        for peer in (after, before)
    )
    transfer = Transfer(world, store, sends=sends, receives=receives, threaded=driver == "thread")
    if silent:
        world.barrier(doing="begin")
        if world.rank == 1:
            # Past the others' limit: they have ended the job by then.
            time.sleep(60)
        try:
            while True:
                transfer.progress(0)
        except StallError as error:
            return {"error": str(error)}
    for step in range(PARCELS):
        transfer.progress(step)
        world.allreduce(np.full(2000, step), op="sum", doing="step")
    figures = transfer.finish(None)
    return {"arrived": sorted(row[0] for row in store.arrived.values()), "figures": figures}


def main() -> None:
    out, driver, silent = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "silent"
    uses_torch = "TORCHELASTIC_RUN_ID" in os.environ
    if uses_torch:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    world = discover_world(timeout_s=1 if silent else 60)
    report = carry(world, driver, silent=silent) | {"threaded": world.threaded}
    (out / f"{world.rank}.json").write_text(json.dumps(report))
    if silent:
        world.abort("the exchange stalled")
    world.barrier(doing="end")
    world.close()
    if uses_torch:
        dist.destroy_process_group()


main()
