"""Find out which world this process was started in.

The variables only say which medium to use; rank and size come from the medium itself, and must
agree with them. A process started by the wrong launcher would believe that it is alone: that is an
error, never a world of one.
"""

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NoReturn

from dataio.base.errors import WorldError, install_command
from dataio.world.abandoned import remove_abandoned
from dataio.world.abort import install_abort_hooks, keep_lines_whole
from dataio.world.base import Bytes, Request, Transport
from dataio.world.launchers import (
    Claim,
    check_alone,
    find_launcher,
    local_rank,
    mpi_claim,
    number,
    rack,
    torchrun_claim,
)
from dataio.world.limits import check_shared_memory, choose_netmod, claim_open_files
from dataio.world.start import watch_mpi_start, watch_start
from dataio.world.topology import Topology
from dataio.world.world import World

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Medium = Literal["single", "mpi", "torch"]


def discover_world(*, ranks_per_node: int | None = None, timeout_s: float = 300.0) -> World:
    """Join the world this process was started in. Collective.

    Args:
        ranks_per_node: Simulate nodes of this many consecutive ranks, >= 1, as the variable
            TONARI_RANKS_PER_NODE does. Defaults to real nodes, known by host name and boot.
        timeout_s: Longest wait for another rank, > 0.

    Raises:
        WorldError: If launcher, MPI and torch.distributed disagree, or what they need is missing.
    """
    if ranks_per_node is not None and ranks_per_node < 1:
        raise ValueError(f"discover_world: ranks_per_node is {ranks_per_node}, must be >= 1")
    keep_lines_whole()
    per_node = ranks_per_node or number(os.environ, "TONARI_RANKS_PER_NODE", least=1)
    torch = torch_claim()
    transport = _open(choose_medium(os.environ, torch), timeout_s)
    # Enough of a world to end the job and to ask for the nodes.
    world = World(transport, Topology((0,) * transport.world_size), timeout_s=timeout_s)
    install_abort_hooks(world)
    if torch:
        words = f"rank {world.rank} of {world.world_size}"
        _check_claims(Claim(world.rank, world.world_size, words), torch)
    return World(transport, _find_nodes(world, per_node), timeout_s=timeout_s)


def torch_world(*, timeout_s: float) -> World:
    """Make a world of the ranks of torch's default group, whoever the launcher says they are.

    Collective.
    """
    from dataio.world.torch import TorchTransport

    transport = TorchTransport(timeout_s=timeout_s)
    world = World(transport, Topology((0,) * transport.world_size), timeout_s=timeout_s)
    per_node = number(os.environ, "TONARI_RANKS_PER_NODE", least=1)
    return World(transport, _find_nodes(world, per_node), timeout_s=timeout_s)


def choose_medium(environ: Mapping[str, str], torch: Claim | None) -> Medium:
    """Decide from the launcher's variables and torch's default group, if there is one."""
    mpi, torchrun = mpi_claim(environ), torchrun_claim(environ)
    if mpi and mpi.is_job and "TORCHELASTIC_RUN_ID" in environ:
        _check_agents(environ, mpi)
        mpi = None
    if mpi and mpi.is_job:
        if torchrun and not torch:
            _check_claims(mpi, torchrun)
        return "mpi"
    if torchrun and torchrun.is_job and not torch:
        raise WorldError(
            f"world: {torchrun.words} say that torchrun started several ranks, but "
            "torch.distributed has no process group; call torch.distributed.init_process_group "
            "first, before anything of Tonari"
        )
    if torch and torch.is_job:
        return "torch"
    check_alone(environ)
    return "single"


def launcher_name(world_size: int) -> str:
    """Name what started the ranks, for reports: ``"alone"``, ``"srun"``, ``"mpiexec"``, ..."""
    if world_size == 1:
        return "alone"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    claim = mpi_claim(os.environ)
    return find_launcher(os.environ).name if claim and claim.is_job else "by hand"


def torch_claim() -> Claim | None:
    """Ask torch.distributed, if the program has imported it and initialised its default group."""
    if "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    return Claim(rank, size, f"torch.distributed (rank {rank} of {size})")


def _check_agents(environ: Mapping[str, str], mpi: Claim) -> None:
    # `srun torchrun` and `mpiexec torchrun`: the MPI variables count torchrun's agents, not the
    # ranks they start.
    agents = number(environ, "GROUP_WORLD_SIZE") or 1
    if mpi.world_size not in (None, agents):
        raise WorldError(
            f"world: {mpi.words}, but torchrun counts {agents} of itself (GROUP_WORLD_SIZE): each "
            f"torchrun would train apart; give torchrun --nnodes={mpi.world_size} and one "
            "--rdzv-endpoint, or use one launcher only"
        )


def _check_claims(mpi: Claim, other: Claim) -> None:
    if other.rank != mpi.rank or mpi.world_size not in (None, other.world_size):
        raise WorldError(
            f"world: MPI and torch disagree: MPI says {mpi.words}, torch {other.words}; both must "
            "number the same ranks alike: use one launcher, and give init_process_group MPI's "
            "rank and world_size"
        )


def _open(medium: Medium, timeout_s: float) -> Transport:
    if medium != "single":
        claim_open_files()
    if medium == "mpi":
        return _open_mpi(timeout_s)
    if medium == "torch":
        from dataio.world.torch import TorchTransport

        return TorchTransport(timeout_s=timeout_s)
    return SingleTransport()


def _open_mpi(timeout_s: float) -> Transport:
    claim = mpi_claim(os.environ)
    assert claim is not None, "MPI is chosen by its claim"
    if local_rank(os.environ) == 0:
        remove_abandoned()
    # Who chose UCX's ways, or started MPI already, has seen to it.
    if "PMI_RANK" in os.environ and "UCX_TLS" not in os.environ and "mpi4py.MPI" not in sys.modules:
        check_shared_memory(number(os.environ, "MPI_LOCALNRANKS", least=1) or 1)
    choose_netmod(os.environ)
    try:
        with _watched_start(timeout_s):
            from dataio.world.mpi import MPITransport, watch_os_exit

            transport = MPITransport()
    except ModuleNotFoundError as error:
        raise WorldError(
            f"world: {claim.words} say that MPI started this process, but mpi4py is not installed; "
            f"run `{install_command('mpi')}` in this environment"
        ) from error
    except (ImportError, RuntimeError) as error:
        raise WorldError(
            f"world: {claim.words} say that MPI started this process, but mpi4py cannot load an "
            f"MPI library: {error}; load the module of the MPI whose launcher you use, or run "
            f"`{install_command('mpi-bundled')}`"
        ) from error
    if claim.world_size not in (None, transport.world_size) or claim.rank != transport.rank:
        raise WorldError(
            f"world: {claim.words}, but mpi4py finds itself rank {transport.rank} of "
            f"{transport.world_size}: it was built against another MPI than the launcher's; use "
            "the launcher of mpi4py's MPI, or rebuild it with `pip install --no-binary mpi4py "
            "--force-reinstall mpi4py` after loading the launcher's MPI"
        )
    if transport.world_size > 1:
        watch_os_exit(transport)
    return transport


def _watched_start(timeout_s: float) -> AbstractContextManager[None]:
    if "mpi4py.MPI" in sys.modules:
        return watch_start("MPI_Comm_dup", timeout_s=timeout_s)
    return watch_mpi_start(timeout_s=timeout_s)


def _find_nodes(world: World, per_node: int | None) -> Topology:
    """Find which ranks share a node. Collective."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    named = rack(os.environ) if world.world_size > 1 else ""
    mine = f"{socket.gethostname()} {boot}\n{per_node}\n{named}"
    texts = world.allgather(mine.encode(), doing="finding nodes")
    names, asked, racks = zip(*(text.decode().split("\n") for text in texts), strict=True)
    if len(set(asked)) > 1:
        other = next(rank for rank, text in enumerate(asked) if text != asked[0])
        raise WorldError(
            f"world: rank 0 was given {asked[0]} ranks per node, rank {other} {asked[other]}; pass "
            "the same ranks_per_node (or TONARI_RANKS_PER_NODE) to every rank"
        )
    if per_node:
        names = tuple(str(rank // per_node) for rank in range(world.world_size))
    return Topology.from_names(names, by_host=not per_node, racks=racks)


class SingleTransport:
    """Rank 0 of 1."""

    rank, world_size, threaded = 0, 1, False

    def isend(self, data: Bytes, *, dest: int, tag: int) -> Request:
        raise ValueError(f"world: there is one rank, none numbered {dest} to send to")

    def irecv(self, into: Bytes, *, source: int, tag: int) -> Request:
        raise ValueError(f"world: there is one rank, none numbered {source} to receive from")

    def abort(self, message: str) -> NoReturn:
        sys.exit(message)

    def close(self) -> None:
        return None


def single_world() -> World:
    """Make the world of one process."""
    return World(SingleTransport(), Topology((0,)))
