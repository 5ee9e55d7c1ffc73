"""Started by mpiexec, but every rank makes a torch group of its own: it would train alone."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from dataio.base.errors import WorldError
from dataio.world import discover_world


def main() -> None:
    store = Path(sys.argv[1], f"store{os.environ['PMI_RANK']}")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        discover_world(timeout_s=30)
        message = ""
    except WorldError as error:
        message = str(error)
    Path(sys.argv[1], f"{os.environ['PMI_RANK']}.json").write_text(json.dumps(message))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
