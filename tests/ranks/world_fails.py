"""Rank 1 fails in the way named by the second argument while the others wait for it."""

import os
import resource
import sys
import threading
import time

import numpy as np

from dataio import open_source
from dataio.world import World, discover_world


def fail() -> None:
    raise OSError("the disk of rank 1 is on fire")


def poll_beside_training(world: World) -> None:
    """Do what an exchange does: a thread asks MPI again and again, the main thread trains."""
    import torch

    requests = [
        world.irecv(np.empty(1, np.uint8), source=rank, tag=1)
        for rank in range(world.world_size)
        if rank != world.rank
    ]

    def poll() -> None:
        while not any(request.test() for request in requests):
            pass

    threading.Thread(target=poll, daemon=True).start()
    world.barrier(doing="starting to train")
    if world.rank == 1:
        fail()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        torch.tensor([1.0, 2.0])


def main() -> None:
    way = sys.argv[2]
    if way == "small":
        # As a container or a careful administrator gives them.
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    world = discover_world(timeout_s=2 if way == "stall" else 600)
    if way == "all":
        open_source("/nowhere/train-0.tar", world=world)
    if way == "training":
        poll_beside_training(world)
    if world.rank == 1:
        if way == "os_exit":
            os._exit(0)
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
