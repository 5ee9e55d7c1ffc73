"""What a job of several ranks needs before MPI begins: files, memory, and a way that works."""

import os
import resource
from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from dataio.base.errors import WorldError
from dataio.base.sizes import format_bytes

MOST_OPEN_FILES = 1 << 16
LEAST_OPEN_FILES = 64
"""Of a rank: MPICH fails with fewer than 32, some with a message of its own, some without."""

SHM = Path("/dev/shm")
RANK_SHM_BYTES = 11 << 19
"""What a rank takes there: MPICH 1 MiB, UCX 4.2 MiB, as measured with 1 to 4 ranks."""
LAST_RANK_SHM_BYTES = 17 << 20
"""What must be free for it: within 16 MiB UCX ends the process by a segmentation fault."""


def claim_open_files(least: int = LEAST_OPEN_FILES) -> None:
    """Raise this process's limit of open files as far as it may.

    Args:
        least: Files that the job needs.

    Raises:
        WorldError: If it may not open so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < least:
        raise WorldError(
            f"open files: this process may open {soft}, expected {least} or more for its "
            "connections to other ranks; run `ulimit -n 4096` before the job, or ask the "
            "administrator for a higher hard limit"
        )


def check_shared_memory(num_local: int, directory: Path = SHM) -> None:
    """Refuse to start MPICH where too little shared memory would end it without a message.

    Args:
        num_local: Ranks of this node.
        directory: Where shared memory lies.

    Raises:
        WorldError: If there is too little.
    """
    if not directory.is_dir():
        return
    found = os.statvfs(directory)
    num_bytes, free_bytes = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    needed_bytes = LAST_RANK_SHM_BYTES + (num_local - 1) * RANK_SHM_BYTES
    # Ranks that were faster have taken their part already: of what is free, one part is enough.
    if num_bytes < needed_bytes or free_bytes < LAST_RANK_SHM_BYTES:
        raise WorldError(
            f"{directory}: {format_bytes(free_bytes)} of {format_bytes(num_bytes)} are free, "
            f"expected {format_bytes(needed_bytes)} for {num_local} ranks on this node, as MPI "
            "would end by a segmentation fault; start a container with --shm-size=1g or "
            "--ipc=host, remove what ended jobs left there, or set UCX_TLS=^posix to do without"
        )


NETMOD = "MPIR_CVAR_CH4_NETMOD"
CHOICES = (NETMOD, "UCX_TLS", "UCX_NET_DEVICES")
"""Who sets one of these has chosen the way."""


def choose_netmod(environ: MutableMapping[str, str]) -> None:
    """Choose libfabric, not UCX, where srun starts ranks of the MPICH from pip.

    For UCX, MPICH 5.0 publishes 4 KiB of its stack as a rank's address, most of it left over from
    earlier calls. What does not compress makes requests of more than 1,024 characters, which Slurm
    takes for two and answers neither: MPI_Init then waits for ever. Such an address of libfabric
    takes 65 characters.

    Args:
        environ: Of this process, before mpi4py is imported.
    """
    by_slurm = "SLURM_STEP_ID" in environ and "PMI_FD" in environ
    if by_slurm and not any(name in environ for name in CHOICES) and _is_from_pip():
        environ[NETMOD] = "ofi"


def _is_from_pip() -> bool:
    try:
        distribution("mpich")
    except PackageNotFoundError:
        return False
    return True
