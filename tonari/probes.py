"""Checks that need several ranks: do they reach each other through MPI, and through torch?

Run as a program, it is one of these ranks.
"""

import importlib.util
import os
import sys
import time

import numpy as np

from dataio.base.errors import WorldError, install_command
from dataio.world import World, discover_world, watch_start
from dataio.world.discover import choose_medium
from dataio.world.launchers import without_ranks
from tonari.checks import Finding
from tonari.errors import CommandError
from tonari.mpi import mpiexec_command
from tonari.processes import run_group

PROBE_BYTES = 4 * 2**20
MARK = "tonari-probe: "


def in_job() -> bool:
    """Say whether a launcher started this process as one of several ranks.

    Raises:
        WorldError: If it did, but in a way that no world can be found.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ or choose_medium(os.environ, None) != "single"


def join(*, timeout_s: float = 30.0) -> World:
    """Join the world of this job, whichever launcher started it. Collective.

    Args:
        timeout_s: Longest wait for another rank.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import torch.distributed as dist

        with watch_start("init_process_group"):
            dist.init_process_group("gloo")
    return discover_world(timeout_s=timeout_s)


def medium_words() -> str:
    """Name what the ranks of this job talk through."""
    room, _, _ = World.__module__.rpartition(".")
    if f"{room}.mpi" in sys.modules:
        from dataio.world.mpi import library_words

        return library_words()
    return "torch.distributed, gloo" if "TORCHELASTIC_RUN_ID" in os.environ else "no MPI"


def exchange(world: World) -> str:
    """Pass bytes round the ring of ranks, and say how it went. Collective.

    Raises:
        WorldError: If bytes do not arrive as they were sent.
    """
    after, before = ((world.rank + step) % world.world_size for step in (1, -1))
    sent = np.full(PROBE_BYTES, world.rank % 251, np.uint8)
    got = np.full(PROBE_BYTES, 255, np.uint8)
    started = time.perf_counter()
    if world.world_size > 1:
        requests = [world.irecv(got, source=before, tag=0), world.isend(sent, dest=after, tag=0)]
        world.wait(requests, peers=[before, after], doing="passing bytes round (doctor)")
        if not (got == before % 251).all():
            raise WorldError(
                f"world: rank {world.rank} did not get the bytes that rank {before} sent; the "
                "network or the MPI library is faulty: try another of its transports"
            )
    rate = PROBE_BYTES / (time.perf_counter() - started) / 1e6
    world.barrier(doing="ending the exchange (doctor)")
    ranks = f"{world.world_size} rank{'s' if world.world_size > 1 else ''}"
    nodes = f"{world.num_nodes} node{'s' if world.num_nodes > 1 else ''}"
    return f"{ranks} on {nodes} exchanged bytes, {rate:,.0f} MB/s a rank, connecting included"


def probe_mpi(ranks: int, *, timeout_s: float) -> Finding:
    """Start ranks under mpiexec and let them exchange bytes."""
    if importlib.util.find_spec("mpi4py") is None:
        bundled = install_command("mpi-bundled")
        cure = f"for jobs under mpiexec: {bundled}, or its extra mpi for the MPI of your site"
        return Finding("MPI", "look", "mpi4py is not installed", cure)
    try:
        command = mpiexec_command(ranks)
    except CommandError as absent:
        found, _, cure = str(absent).partition("; ")
        return Finding("MPI", "broken", found, cure)
    cure = (
        "mpi4py and mpiexec must come from one MPI: load your site's MPI module and run `pip "
        f"install --no-binary mpi4py --force-reinstall mpi4py`, or {install_command('mpi-bundled')}"
    )
    return _probe("MPI", [*command, sys.executable], ranks, timeout_s=timeout_s, cure=cure)


def probe_torch(ranks: int, *, timeout_s: float) -> Finding:
    """Start ranks under torchrun and let them exchange bytes through gloo."""
    cure = (
        "gloo must find an address of this machine: see that its host name resolves, or set "
        "GLOO_SOCKET_IFNAME to an interface that `ip link` lists"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launch, f"--nproc-per-node={ranks}"]
    return _probe("torch.distributed", command, ranks, timeout_s=timeout_s, cure=cure)


def _probe(check: str, launch: list[str], ranks: int, *, timeout_s: float, cure: str) -> Finding:
    # `mpiexec -n 1 tonari doctor`: the outer launcher's variables would mislead the inner ranks.
    env = without_ranks(os.environ)
    command = [*launch, "-m", "tonari.probes"]
    status, said = run_group(command, timeout_s=timeout_s, env=env | {"OMP_NUM_THREADS": "1"})
    told = [line.partition(MARK)[2] for line in said.splitlines() if MARK in line]
    if status == 0 and told and told[0].startswith(f"{ranks} rank"):
        return Finding(check, "fine", told[0])
    lines = [line.strip() for line in said.splitlines() if "Error" in line or MARK in line]
    ended = f"ended with {status}"
    if status is None:
        ended, cure = f"no answer within {timeout_s:g} s", f"wait longer (--timeout-s), else {cure}"
    return Finding(check, "broken", f"{ended}: {(lines or ['nothing was said'])[-1]}", cure)


def main() -> None:
    """Be one rank of a probe."""
    with join() as world:
        words = exchange(world)
        if world.rank == 0:
            print(f"{MARK}{words}", flush=True)


if __name__ == "__main__":
    main()
