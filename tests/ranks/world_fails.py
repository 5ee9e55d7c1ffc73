"""Rank 1 fails in the way named by the second argument while the others wait for it."""

import os
import sys
import threading
import time

from dataio import open_source
from dataio.world import discover_world


def fail() -> None:
    raise OSError("the disk of rank 1 is on fire")


def main() -> None:
    way = sys.argv[2]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    world = discover_world(timeout_s=2 if way == "stall" else 60)
    if way == "all":
        open_source("/nowhere/train-0.tar", world=world)
    if world.rank == 1:
        if way == "error":
            fail()
        if way == "thread":
            threading.Thread(target=fail).start()
        if way == "sys_exit":
            sys.exit(3)
        if way == "sys_exit_caught":
            try:
                sys.exit(3)
            except SystemExit as error:
                print(f"caught {error.code}")
        if way == "stall":
            time.sleep(60)
    world.barrier(doing="waiting for everyone")


if __name__ == "__main__":
    main()
