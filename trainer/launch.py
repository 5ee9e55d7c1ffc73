"""Join the job, by any launcher: ranks, this rank's device, torch's default process group."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# torch.distributed offers them too, but not to type checkers.
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from dataio.errors import DataioError
from dataio.world import World, discover_world, wait_for_rank_0
from trainer.errors import ConfigError


@dataclass(frozen=True)
class Job:
    """Who this process is, and where it computes."""

    world: World
    device: torch.device


@contextmanager
def join(*, device: str = "auto", timeout_s: float = 300.0) -> Iterator[Job]:
    """Join torch's default process group: by torchrun, mpiexec, srun, or alone. Collective.

    A group that the program has already made is used, and left as it is. With several ranks, an
    error of ours that leaves the context ends the whole job.

    Args:
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: CUDA where there is one.
        timeout_s: Longest wait for another rank, > 0.

    Raises:
        ConfigError: If there is no CUDA device for this rank.
        WorldError: If launchers disagree.
    """
    on_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    owned = not dist.is_initialized()
    if owned:
        _initialise("cpu:gloo,cuda:nccl" if on_cuda else "gloo", timeout_s)
    with discover_world(timeout_s=timeout_s) as world:
        with _ending_together(world):
            yield Job(world, _own_device(world) if on_cuda else torch.device("cpu"))
    # Not after an error: it may wait for ranks that are gone.
    if owned:
        dist.destroy_process_group()


@contextmanager
def _ending_together(world: World) -> Iterator[None]:
    """End the job on an error of ours; the hooks of the world do so on others, with their trace."""
    try:
        yield
    except (DataioError, ConfigError) as error:
        # A command would turn it into an exit status, and the other ranks would wait for ever.
        if world.world_size > 1:
            wait_for_rank_0(world, error)
            world.abort(f"{type(error).__name__}: {error}")
        raise


def _initialise(backend: str, timeout_s: float) -> None:
    limit = timedelta(seconds=timeout_s)
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=limit)
        return
    with discover_world(timeout_s=timeout_s) as world:
        hosts = world.allgather(socket.gethostname().encode(), doing="finding rank 0's host")
        _share_cores(hosts.count(hosts[world.rank]))
        host = hosts[0].decode() if len(set(hosts)) > 1 else "127.0.0.1"
        store = _open_store(world, host, limit)
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.world_size, timeout=limit
        )


def _share_cores(num_local: int) -> None:
    # torchrun does this through the same variable; MPI launchers leave every rank all cores.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // num_local, 1))


def _open_store(world: World, host: str, limit: timedelta) -> Store:
    if world.world_size == 1:
        return HashStore()
    # Port 0: the system picks a free one, and nobody can take it in between.
    own = None
    if world.rank == 0:
        own = TCPStore(
            host, 0, world.world_size, is_master=True, timeout=limit, wait_for_workers=False
        )
    port = world.allgather(str(own.port if own else 0).encode(), doing="sharing rank 0's port")[0]
    return own or TCPStore(host, int(port), world.world_size, timeout=limit)


def _own_device(world: World) -> torch.device:
    found = torch.cuda.device_count()
    if world.local_rank >= found:
        raise ConfigError(
            f"rank {world.rank}: local rank {world.local_rank}, but the node has {found} CUDA "
            f"devices; start at most {found} ranks a node, or set run.device=cpu"
        )
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)
