"""Join the job, by any launcher: ranks, this rank's device, torch's default process group."""

import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous

from dataio.arguments import find_device
from dataio.base.errors import DataioError, WorldError
from dataio.job.faults import find_cause, is_of_a_peer
from dataio.job.memory import keep_freed_memory
from dataio.job.watchdog import Watchdog
from dataio.world import (
    World,
    claim_open_files,
    discover_world,
    keep_lines_whole,
    wait_for_rank_0,
    watch_start,
)

LATER_S = 30.0
"""How much longer torch waits for a rank than the watchdog, whose message says more."""

OPEN_FILES, OPEN_FILES_PER_RANK = 96, 12
"""What a rank opens, and how much more for each rank of the job: 112 at most of 4, as measured."""


@dataclass(frozen=True)
class Job:
    """Who this process is, where it computes, and who watches over it."""

    world: World
    device: torch.device
    watchdog: Watchdog


@contextmanager
def join(
    *, device: str = "auto", timeout_s: float = 300.0, silent_s: float = 20.0
) -> Iterator[Job]:
    """Join torch's default process group: by torchrun, mpiexec, srun, or alone. Collective.

    A group that the program has already made is used, and left as it is. With several ranks, an
    error that leaves the context ends the whole job, with the name of the rank that caused it.

    Args:
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: CUDA where there is one.
        timeout_s: Longest wait for another rank, > 0.
        silent_s: Longest time without a sign of life of another rank's process, >= 2.

    Raises:
        ValueError: If torch sees no such device.
        WorldError: If launchers disagree, too few files may be opened, or there are fewer CUDA
            devices than ranks.
    """
    keep_lines_whole()
    if device != "auto":
        find_device(device, name="join: device")
    on_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if not on_cuda:
        keep_freed_memory()
    owned = not dist.is_initialized()
    if owned:
        _initialise("cpu:gloo,cuda:nccl" if on_cuda else "gloo", timeout_s)
    may_wait = dist.get_world_size() > 1
    try:
        with discover_world(timeout_s=timeout_s) as world:
            store = _open_store(world, timedelta(seconds=timeout_s)) if may_wait else None
            watchdog = Watchdog(world, store, timeout_s=timeout_s, silent_s=silent_s)
            watchdog.start()
            with _ending_together(world, watchdog):
                yield Job(world, own_device(world) if on_cuda else torch.device("cpu"), watchdog)
            watchdog.close()
        may_wait = False
    finally:
        # After an error only if there are no others: it may wait for ranks that are gone.
        if owned and not may_wait:
            dist.destroy_process_group()


@contextmanager
def _ending_together(world: World, watchdog: Watchdog) -> Iterator[None]:
    """End the job on an error of ours, or of a peer; the hooks of the world do so on others."""
    try:
        yield
    except Exception as error:
        if world.world_size > 1:
            cause = find_cause(error)
            if is_of_a_peer(cause):
                watchdog.end(cause)
            words = watchdog.fail(cause)
            # A command would turn it into an exit status, and the other ranks would wait for ever.
            if isinstance(error, DataioError):
                wait_for_rank_0(world, error)
                world.abort(words)
            print(f"[rank {world.rank}] {words}", file=sys.stderr, flush=True)
        raise


def _initialise(backend: str, timeout_s: float) -> None:
    limit = timedelta(seconds=timeout_s + LATER_S)
    if dist.is_torchelastic_launched():
        claim_files_of_ranks(int(os.environ["WORLD_SIZE"]))
        with watch_start("init_process_group", timeout_s=timeout_s):
            store, rank, world_size = next(rendezvous("env://", timeout=limit))
            # torchrun's store keeps the addresses of a group that this process has left.
            store = PrefixStore(f"join {store.add(f'joins of rank {rank}', 1)}", store)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=limit
            )
        return
    with discover_world(timeout_s=timeout_s) as world:
        claim_files_of_ranks(world.world_size)
        share_cores(world)
        with watch_start("init_process_group", timeout_s=timeout_s):
            store = _open_store(world, limit)
            dist.init_process_group(
                backend, store=store, rank=world.rank, world_size=world.world_size, timeout=limit
            )


def claim_files_of_ranks(world_size: int) -> None:
    """Let this process open as many files as so many ranks need, or raise WorldError."""
    # Gloo ends the process without a word of its own where a connection cannot be opened.
    if world_size > 1:
        claim_open_files(OPEN_FILES + world_size * OPEN_FILES_PER_RANK)


def share_cores(world: World) -> None:
    """Give a rank its part of the cores that others have too, unless OMP_NUM_THREADS is set.

    Collective.
    """
    # torchrun does this by that variable. Of others some leave each rank all cores, some bind it.
    host, cores = socket.gethostname(), os.sched_getaffinity(0)
    said = world.allgather(json.dumps([host, *cores]).encode(), doing="comparing cores")
    found = [json.loads(each) for each in said]
    num_sharing = sum(its == host and not cores.isdisjoint(theirs) for its, *theirs in found)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(len(cores) // num_sharing, 1))


def _find_hosts(world: World) -> list[str]:
    own = socket.gethostname().encode()
    return [host.decode() for host in world.allgather(own, doing="finding rank 0's host")]


def _open_store(world: World, limit: timedelta) -> Store:
    if world.world_size == 1:
        return HashStore()
    hosts = _find_hosts(world)
    # As torchrun's: where rank 0's name cannot be resolved, or leads to another network.
    host = os.environ.get("MASTER_ADDR", hosts[0]) if len(set(hosts)) > 1 else "127.0.0.1"
    # Port 0: the system picks a free one, and nobody can take it in between.
    own = None
    if world.rank == 0:
        own = TCPStore(
            host, 0, world.world_size, is_master=True, timeout=limit, wait_for_workers=False
        )
    port = world.allgather(str(own.port if own else 0).encode(), doing="sharing rank 0's port")[0]
    return own or TCPStore(host, int(port), world.world_size, timeout=limit)


def own_device(world: World) -> torch.device:
    """Take the CUDA device that is this rank's; raises what `choose_device` does. Collective."""
    seen = [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]
    number = choose_device(world, seen)
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def choose_device(world: World, seen: Sequence[str]) -> int:
    """Choose a rank's CUDA device: one for each rank of its node. Collective.

    Args:
        world: All ranks.
        seen: What identifies the devices that this rank sees, in their order.

    Returns:
        Its place in ``seen``.

    Raises:
        WorldError: If there are fewer devices than ranks.
    """
    found = world.allgather(" ".join(seen).encode(), doing="comparing CUDA devices")
    nodes = world.topology.node_of_rank
    on_node = [words for words, node in zip(found, nodes, strict=True) if node == world.node]
    if len(seen) == 1 and len(set(on_node)) == len(on_node):
        # The launcher has given each rank its own, as srun --gpus-per-task does.
        return 0
    if world.local_rank >= len(seen):
        raise WorldError(
            f"rank {world.rank}: local rank {world.local_rank}, but it sees {len(seen)} CUDA "
            f"devices; start at most {len(seen)} ranks a node, let the launcher show each rank all "
            "devices of the node or one of its own, or take the CPU (in TOML run.device=cpu)"
        )
    return world.local_rank
