"""The shipped loader on every rank, as several shuffles move its rows from epoch to epoch.

Arguments: report directory, directory of the caches, samples, epochs, and the shuffles as a JSON
list: the fraction of a replica's rows that an exchange takes, or -1 to deal all rows anew.
"""

import json
import os
import sys
from pathlib import Path

from dataio.world import discover_world
from shuffle import Global, Partial
from tests.memory_source import MemorySource
from tests.shuffle.epochs import run_epochs


def main() -> None:
    out, root, num_samples, epochs = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:5])
    uses_torch = "TORCHELASTIC_RUN_ID" in os.environ
    if uses_torch:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    world = discover_world(timeout_s=60)
    histories = []
    for number, exchange in enumerate(json.loads(sys.argv[5])):
        policy = Global(moves=True) if exchange < 0 else Partial(exchange)
        source = MemorySource(num_samples, block_rows=4)
        histories.append(
            run_epochs(world, root / str(number), policy, source, epochs=epochs, seed=0)
        )
    (out / f"{world.rank}.json").write_text(json.dumps(histories))
    world.close()
    if uses_torch:
        dist.destroy_process_group()


main()
