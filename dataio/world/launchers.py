"""What launchers leave in the environment: who this process is, who started it, what to try.

With discover.py and start.py, which read it from here, the only place for launchers' variables.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dataio.base.errors import WorldError

MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)
UNSIZED_RANKS = ("PMIX_RANK", "PALS_RANKID")
"""Set without a number of ranks beside them: PMIx by itself, srun with an older cray_shasta."""
TASK_VARIABLES = (
    ("FLUX_TASK_RANK", ("FLUX_JOB_SIZE",)),
    ("SLURM_STEP_ID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)
"""Set in each process that a launcher started, whether for MPI or not, and how many there are.

Flux first: it may itself run inside a step of Slurm. Outside a step (batch script, salloc) Slurm's
number is only what was asked for.
"""
LOCAL_RANKS = (
    "LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID", "MV2_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK",
    "SLURM_LOCALID",
)  # fmt: skip
SHOWN = (
    "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_MPI_TYPE", "FLUX_TASK_RANK",
    "FLUX_JOB_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "PJM_JOBID", "PALS_RANKID",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "PMI_FD", "PMI_PORT",
    "PMI_CONTROL_PORT", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "PMIX_NAMESPACE",
    "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Shown in messages; none holds a secret, as PMI_SHARED_SECRET does."""

LAUNCHER_PREFIXES = (
    "PMI", "OMPI_", "HYD", "MPI_LOCAL", "TORCHELASTIC_", "TONARI_RANKS", "PALS_", "JSM_NAMESPACE_",
    "FLUX_TASK_", "FLUX_JOB_SIZE", "MV2_COMM_",
)  # fmt: skip
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
"""Of variables that launchers set in a rank alone."""

OF_SITE = "the site's MPI module, with mpi4py built against it"


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks.

    Attributes:
        name: As a user types it.
        sign: A variable that it sets in each process; those further up the table are more certain.
        cure: What to try where its ranks do not find one another through MPI.
    """

    name: str
    sign: str
    cure: str


LAUNCHERS = (
    Launcher(
        "torchrun", "TORCHELASTIC_RUN_ID",
        "the same --nnodes and --rdzv-endpoint on every node, a host name and port that all nodes "
        "reach, GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) set to the interface between them",
    ),
    Launcher(
        "flux run", "FLUX_TASK_RANK",
        f"flux run -o pmi=simple, pmix or (for cray-mpich) cray-pals, or {OF_SITE}",
    ),
    Launcher("jsrun", "JSM_NAMESPACE_RANK", f"{OF_SITE} (Spectrum MPI)"),
    Launcher("mpiexec", "MPI_LOCALRANKID", f"the mpiexec of mpi4py's own MPI, or {OF_SITE}"),
    Launcher("mpiexec", "OMPI_COMM_WORLD_RANK", f"mpi4py built with this Open MPI, or {OF_SITE}"),
    Launcher(
        "srun", "SLURM_STEP_ID",
        "srun --mpi=pmi2 for pip's mpich (also with MPIR_CVAR_CH4_NETMOD=ofi), srun --mpi=pmix for "
        "Open MPI (srun --mpi=list names what there is), the mpiexec of mpi4py's own MPI inside "
        "the job, or "
        f"{OF_SITE}",
    ),
    Launcher("PALS mpiexec", "PALS_RANKID", f"{OF_SITE} (cray-mpich)"),
    Launcher("PJM mpiexec", "PJM_JOBID", f"{OF_SITE} (on Fugaku with the site's libpmix)"),
    Launcher("mpiexec", "PMI_RANK", f"the mpiexec of mpi4py's own MPI, or {OF_SITE}"),
    Launcher("mpiexec", "PMIX_RANK", f"an MPI built with PMIx, such as Open MPI, or {OF_SITE}"),
)  # fmt: skip
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


OUTLIVING = {
    "OMPI_COMM_WORLD_RANK": (
        "mpirun --with-ft ulfm of Open MPI 5", ("OMPI_MCA_mpi_ft_enable", "1"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMIX_NAMESPACE",),
    ),
    "SLURM_STEP_ID": (
        "SLURM_KILL_BAD_EXIT=0 srun --no-kill", ("SLURM_KILL_BAD_EXIT", "0"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
}  # fmt: skip
"""Launchers that may let ranks live on when others are lost, by their sign: what a user types for
it, what ranks see of that, who they are, and the name of this start alone.

MPICH's mpiexec is none: hydra 5.0.2 ends all of a node also with -disable-auto-cleanup.
"""
BY_HAND = Launcher("by hand", "", "torchrun, mpiexec or srun to start all ranks")


@dataclass(frozen=True)
class Claim:
    """What somebody says about this process, and the words to repeat in a message."""

    rank: int
    world_size: int | None
    words: str

    @property
    def is_job(self) -> bool:
        # PMIx alone does not say how many: MPI will.
        return self.world_size is None or self.world_size > 1


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out what makes a process a rank: for one that a rank starts, and that is alone."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(LAUNCHER_PREFIXES)
        and name not in (*LAUNCHER_NAMES, *TORCHRUN, "SLURM_STEP_ID")
    }


def find_launcher(environ: Mapping[str, str]) -> Launcher:
    """Name what started this process, by the variables that it left."""
    return next((launcher for launcher in LAUNCHERS if launcher.sign in environ), BY_HAND)


def describe_pmi(environ: Mapping[str, str]) -> str:
    """Name the way in which ranks find one another through their launcher."""
    if "PMIX_RANK" in environ:
        return "PMIx"
    if "PMI_CONTROL_PORT" in environ:
        return "Cray's PMI"
    if "PMI_FD" in environ or "PMI_PORT" in environ:
        return "PMI-1 or PMI-2"
    return "no PMI"


def shown_variables(environ: Mapping[str, str]) -> str:
    """List what the launcher left, for a message."""
    return ", ".join(f"{name}={environ[name]}" for name in SHOWN if name in environ) or "none"


def mpi_claim(environ: Mapping[str, str]) -> Claim | None:
    """Read what an MPI launcher left: mpiexec of any family, srun or Flux with a PMI, jsrun."""
    for rank_name, size_name in MPI_VARIABLES:
        rank, size = number(environ, rank_name), number(environ, size_name, least=1)
        if rank is not None and size is not None:
            return Claim(rank, size, f"{rank_name}={rank} and {size_name}={size}")
    for rank_name in UNSIZED_RANKS:
        rank = number(environ, rank_name)
        if rank is None:
            continue
        tasks = _tasks(environ)
        if tasks is None:
            return Claim(rank, None, f"{rank_name}={rank}")
        return Claim(rank, tasks[2], f"{rank_name}={rank} and {tasks[1]}={tasks[2]}")
    return None


def torchrun_claim(environ: Mapping[str, str]) -> Claim | None:
    """Read what torchrun left, or who sets the same variables by hand."""
    rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE", least=1)
    if rank is None or size is None:
        return None
    return Claim(rank, size, f"RANK={rank} and WORLD_SIZE={size}")


def outliving_claim(environ: Mapping[str, str]) -> tuple[Claim, str]:
    """Read what a launcher left that lets ranks live on when others are lost.

    Returns:
        Who this process is; the name of this start alone, empty where ranks meet by
        torchrun's variables.

    Raises:
        WorldError: If none did: says how to start them.
    """
    claim = torchrun_claim(environ)
    if claim and all(name in environ for name in TORCHRUN):
        return claim, ""
    launcher = find_launcher(environ)
    cure, asked, names, start = OUTLIVING.get(launcher.sign, ("", ("", ""), ("", ""), ()))
    rank, size = number(environ, names[0]), number(environ, names[1], least=1)
    if environ.get(asked[0]) == asked[1] and rank is not None and size is not None:
        words = f"{names[0]}={rank} and {names[1]}={size}"
        return Claim(rank, size, words), ".".join(environ.get(each, "") for each in start)
    raise WorldError(
        f"live: the ranks were started {'by ' if launcher.sign else ''}{launcher.name}, expected "
        "by what lets the others live on when one is lost; start them by "
        f"{cure + ', or by ' if cure else ''}torchrun, one on each node, or leave live out"
    )


def check_alone(environ: Mapping[str, str]) -> None:
    """Refuse to be a world of one where a launcher started several processes without MPI.

    Raises:
        WorldError: If it did.
    """
    tasks = _tasks(environ)
    if tasks and tasks[2] > 1 and not mpi_claim(environ):
        sign, name, size = tasks
        raise WorldError(
            f"world: {sign}={environ[sign]} with {size} tasks ({name}), but neither MPI variables "
            "(PMI_RANK, PMIX_RANK, OMPI_COMM_WORLD_RANK) nor a torch process group: each task "
            f"would believe it is alone; start with {find_launcher(environ).cure}; or with torchrun"
        )


def local_rank(environ: Mapping[str, str]) -> int | None:
    """Read this process's number on its node; None where no launcher gives one."""
    found = (number(environ, name) for name in LOCAL_RANKS)
    return next((rank for rank in found if rank is not None), None)


def rack(environ: Mapping[str, str]) -> str:
    """Name the rack of this process's node: TONARI_RACK, or Slurm's switches; "" if neither is set.

    Slurm's address of node07 is spine.leaf2.node07, and its pattern switch.switch.node.
    """
    num_switches = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count(".")
    switches = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")[:num_switches]
    return environ.get("TONARI_RACK") or ".".join(switches)


def number(environ: Mapping[str, str], name: str, *, least: int = 0) -> int | None:
    """Read a variable that holds a whole number; None if it is not set.

    Raises:
        WorldError: If it holds anything else.
    """
    text = environ.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise WorldError(
            f"environment: {name}={text!r}, expected a whole number >= {least}; set it right or "
            "unset it"
        )
    return int(text)


def _tasks(environ: Mapping[str, str]) -> tuple[str, str, int] | None:
    """Find what shows that tasks were started, what counts them, and their number."""
    for sign, names in TASK_VARIABLES:
        if sign in environ:
            sizes = ((name, number(environ, name, least=1)) for name in names)
            return next(((sign, name, size) for name, size in sizes if size is not None), None)
    return None
