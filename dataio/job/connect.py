"""Connect ranks that know who they are, without the launcher's store.

Rank 0 writes where its store is into a file. A start that was ended amid this may have left one, by
which nobody answers, or another program: so the file holds a word that the store must know, and is
read again until all are there.
"""

import contextlib
import os
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dataio.base.atomic import write_file
from dataio.base.errors import WorldError
from dataio.base.network import own_name
from dataio.job.meeting import POLL_S
from dataio.world import World
from dataio.world.discover import torch_world

SOON_S = 30.0
"""Longest wait for a rank that was alive a moment ago."""
ONE_TRY, LOOK_S = timedelta(seconds=5), 0.1
"""How long a store may take to answer; between two looks whether all are there."""


def connect(
    file: Path, *, rank: int, world_size: int, timeout_s: float, soon_s: float = SOON_S
) -> World:
    """Make torch's default group and a world of it. Collective.

    Args:
        file: In which rank 0 writes where its store is; all ranks see it, and nobody else uses it.
        rank: In this world.
        world_size: Ranks of it.
        timeout_s: Longest wait for another rank later on.
        soon_s: Longest wait for another rank until all are there.

    Raises:
        WorldError: If rank 0 does not write the file, or not all ranks come.
        RuntimeError: If torch cannot connect them.
    """
    soon = timedelta(seconds=min(timeout_s, soon_s))
    if rank == 0:
        host, word = own_name(), os.urandom(8).hex()
        store = TCPStore(host, 0, world_size, is_master=True, timeout=soon, wait_for_workers=False)
        store.set(f"{word}-0", "")
        try:
            write_file(file, f"{host} {store.port} {word}".encode())
            # Who has died since the list was made is missed here, not after `timeout_s`.
            store.wait([f"{word}-{each}" for each in range(world_size)], soon)
            store.set(f"{word}-all", "")
        finally:
            file.unlink(missing_ok=True)
    else:
        store = find_store(file, rank, world_size, soon.total_seconds())
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    return torch_world(timeout_s=timeout_s)


def find_store(file: Path, rank: int, world_size: int, soon_s: float) -> TCPStore:
    """Wait in the store of rank 0 until all ranks are there."""
    until_s, why = time.monotonic() + soon_s, "it is not there"
    while time.monotonic() < until_s:
        said, store = _read(file), None
        try:
            host, port, word = said.split()
            store = TCPStore(host, int(port), world_size, timeout=ONE_TRY)
            if not store.check([f"{word}-0"]):
                raise RuntimeError(f"another program's store is at {host}:{port}")
            store.set(f"{word}-{rank}", "")
            why = "not all have come"
        except (ValueError, RuntimeError) as error:
            store, why = None, str(error) if said else why
        # That rank 0 is lost is an error at once. The file goes when all are there.
        while store and time.monotonic() < until_s and _read(file) in (said, ""):
            if store.check([f"{word}-all"]):
                return store
            time.sleep(LOOK_S)
        time.sleep(POLL_S)
    raise WorldError(
        f"live: rank {rank} has not found all others by {file} within {soon_s:.0f} s ({why}); see "
        "that all have started, and that all nodes see its directory"
    )


def _read(file: Path) -> str:
    """Read it; empty: it is not there yet, or gone."""
    with contextlib.suppress(OSError):
        return file.read_text()
    return ""
