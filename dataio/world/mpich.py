"""What the MPICH from pip is given before it starts."""

from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, distribution

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
