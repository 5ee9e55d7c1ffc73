"""A rank of a job that is killed: see `tests/faults/kill`.

Arguments: JSON, and the rank where no launcher starts it.
"""

import importlib
import json
import os
import sys

import torch.distributed as dist

from tests.faults.kill.harness import MODULES


def main() -> None:
    request = json.loads(sys.argv[1])
    by_mpi = "PMI_RANK" in os.environ
    rank, ranks = int(os.environ["PMI_RANK"] if by_mpi else sys.argv[2]), request["ranks"]
    joins = ranks > 1 and not by_mpi
    if joins:
        store = f"file://{request['attempt']}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    importlib.import_module(MODULES[request["what"]]).run(request["argument"] | {"rank": rank})
    if joins:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
