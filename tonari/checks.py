"""What `tonari doctor` looks at on this machine, one function a check."""

import importlib.metadata
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dataio.base.errors import CacheError, install_command
from dataio.base.filesystem import (
    MEMORY_BACKED,
    cache_directory,
    filesystem_of,
    is_named,
    scratch_directories,
)
from dataio.rows import at_once
from dataio.rows.jpeg import turbojpeg
from dataio.world.abandoned import abandoned_files
from dataio.world.launchers import (
    LAUNCHER_NAMES,
    LAUNCHER_PREFIXES,
    describe_pmi,
    find_launcher,
)
from tonari.sizes import format_bytes

Verdict = Literal["fine", "look", "broken"]

CORE = ("torch", "numpy", "pyarrow", "webdataset", "fsspec", "xxhash", "simplejpeg", "pillow")
OPTIONAL = {
    "mpi4py": "mpi", "mpich": "mpi-bundled", "tyro": "cli", "rich": "cli",
    "matplotlib": "report", "scikit-learn": "demo",
}  # fmt: skip
SHOWN_NAMES = (
    "TONARI_CACHE", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_PROCID",
    "SLURM_MPI_TYPE", "PBS_JOBID", "PJM_JOBID", "LSB_JOBID", "FLUX_JOB_ID",
)  # fmt: skip
OLDEST_PYTHON = (3, 10)
LOW_DISK_BYTES = 10 * 10**9
LOW_SHM_BYTES = 256 * 2**20
LOW_OPEN_FILES = 1024
CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: What was looked at.
        verdict: ``look``: it works, but not as well or not as expected.
        found: What is there.
        cure: What to do, unless it is fine.
    """

    check: str
    verdict: Verdict
    found: str
    cure: str = ""


def check_machine(cache: str | None) -> Iterator[Finding]:
    """Make every check that needs no other process.

    Args:
        cache: Cache directory; as ``dataio.Loader`` would choose it if left out.
    """
    yield check_python(sys.version_info[:3])
    yield check_packages()
    yield check_pictures()
    yield from check_cache(cache)
    yield check_cpus(len(os.sched_getaffinity(0)), os.cpu_count() or 1, cpu_quota(CGROUP))
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_shm(SHM)
    yield check_launcher()


def check_python(version: tuple[int, int, int]) -> Finding:
    """Compare with the oldest Python that Tonari runs on."""
    found = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        return Finding("Python", "broken", found, "use Python 3.10 or later")
    return Finding("Python", "fine", found)


def check_packages() -> Finding:
    """List what is installed, and what is not."""
    versions = {name: _version(name) for name in (*CORE, *OPTIONAL)}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name in CORE if not versions[name]]
    if missing:
        cure = f"{', '.join(missing)} missing: pip install {' '.join(missing)}"
        return Finding("packages", "broken", found, cure)
    extras = sorted({extra for name, extra in OPTIONAL.items() if not versions[name]})
    if extras:
        cure = f"if you need them: {install_command(','.join(extras))}"
        return Finding("packages", "look", f"{found}; without extras {', '.join(extras)}", cure)
    return Finding("packages", "fine", found)


def check_pictures() -> Finding:
    """Find the library that decodes regions of JPEG pictures, and what calls it for many."""
    library = turbojpeg()
    if library is None:
        cure = f"for quicker random crops: {install_command('images')}, or libjpeg-turbo 3"
        return Finding("pictures", "look", "JPEGs are decoded whole, by simplejpeg", cure)
    found = f"regions of JPEGs by {library._name}"
    if at_once.library() is None:
        cure = "build the wheel where a C compiler is, or here: pip install PATH of a checkout"
        return Finding("pictures", "look", f"{found}, one picture at a time", cure)
    return Finding("pictures", "fine", f"{found}, many pictures in one call")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_cache(choice: str | None) -> Iterator[Finding]:
    """Find, and create, the cache directory as a loader would: filesystem, right to write, room."""
    try:
        directory = cache_directory(choice)
    except CacheError as error:
        # The message names the cure after the first semicolon.
        found, _, cure = str(error).partition("; ")
        yield Finding("cache", "broken", found, cure)
        return
    kind = filesystem_of(directory)
    free_bytes = shutil.disk_usage(directory).free
    lies = "shared" if kind.is_shared else "in memory" if kind.type in MEMORY_BACKED else "local"
    found = f"{directory} on {kind.type} ({lies}), {format_bytes(free_bytes)} free"
    found += "".join(_not_taken(choice))
    if kind.is_shared:
        cure = "TONARI_ALLOW_SHARED_CACHE is set: make sure that each node has its own directory"
        yield Finding("cache", "look", found, cure)
    elif kind.type in MEMORY_BACKED:
        cure = "it lives in memory: set TONARI_CACHE to a disk unless the data fits beside the job"
        yield Finding("cache", "look", found, cure)
    elif free_bytes < LOW_DISK_BYTES:
        cure = "enough for small datasets only: free some space or set TONARI_CACHE"
        yield Finding("cache", "look", found, cure)
    else:
        yield Finding("cache", "fine", found)


def _not_taken(choice: str | None) -> Iterator[str]:
    """Yield the directories that came before the one that is taken, and what is against them."""
    if is_named(choice) or os.environ.get("TONARI_CACHE"):
        return
    for scratch in scratch_directories():
        if not scratch.against:
            return
        yield f"; not {scratch.name}={scratch.path}: it {scratch.against}"


def check_cpus(bound: int, present: int, quota: float | None) -> Finding:
    """Compare the CPUs this process may use with those that are there.

    Args:
        bound: CPUs in the affinity mask.
        present: CPUs of the machine.
        quota: CPUs' worth of time that the control group grants; None without limit.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    limit = f", limited to {quota:g} CPUs' worth of time" if quota else ""
    found = f"bound to {bound} of {present}{limit}, OMP_NUM_THREADS {threads or 'not set'}"
    if bound == 1 < present:
        cure = (
            "decoding threads would share one CPU with training: start with "
            "`mpiexec -bind-to none` (MPICH), `--bind-to none` (Open MPI), `srun -c N`"
        )
        return Finding("CPUs", "look", found, cure)
    if quota is not None and quota < bound:
        cure = f"threads will be stopped and started: use about {max(1, int(quota))} of them"
        return Finding("CPUs", "look", found, cure)
    if threads and threads.isdigit() and int(threads) > bound:
        return Finding("CPUs", "look", found, f"set OMP_NUM_THREADS to at most {bound}")
    return Finding("CPUs", "fine", found)


def cpu_quota(root: Path) -> float | None:
    """Read how many CPUs' worth of time the control group grants; None without limit."""
    limits = [root / "cpu.max", *_own_groups(root)]
    quotas = []
    for path in limits:
        if path.is_file():
            granted, period = path.read_text().split()
            quotas += [] if granted == "max" else [int(granted) / int(period)]
    v1 = [root / "cpu" / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    if all(path.is_file() for path in v1):
        granted_us, period_us = (int(path.read_text()) for path in v1)
        quotas += [granted_us / period_us] if granted_us > 0 else []
    return min(quotas, default=None)


def _own_groups(root: Path) -> Iterator[Path]:
    """Every `cpu.max` from this process's group up."""
    table = Path("/proc/self/cgroup")
    lines = table.read_text().splitlines() if table.is_file() else []
    for line in lines:
        if line.startswith("0::/"):
            own = root / line.removeprefix("0::/")
            yield from (path / "cpu.max" for path in (own, *own.parents) if root in path.parents)


def check_open_files(soft: int, hard: int) -> Finding:
    """Compare the limit of open files with what many shards, fields and connections need."""
    if soft == resource.RLIM_INFINITY or soft >= LOW_OPEN_FILES:
        return Finding("open files", "fine", f"limit {soft}")
    room = hard == resource.RLIM_INFINITY or hard >= LOW_OPEN_FILES
    cure = "run `ulimit -n 4096`" if room else "ask the administrator for a higher hard limit"
    return Finding("open files", "look", f"limit {soft}", f"{cure} before the job")


def check_shm(directory: Path) -> Finding:
    """Look for room in shared memory, which MPI and torch's worker processes use."""
    cure = "in a container: start it with --shm-size=1g or --ipc=host"
    if not directory.is_dir():
        return Finding("shared memory", "look", f"{directory} is not there", cure)
    free_bytes = shutil.disk_usage(directory).free
    found = f"{directory}, {format_bytes(free_bytes)} free"
    left = abandoned_files(directory)
    if left:
        found += (
            f", {len(left)} files of killed MPI jobs, which the next job of several ranks removes"
        )
    low = free_bytes < LOW_SHM_BYTES
    return Finding("shared memory", "look" if low else "fine", found, cure if low else "")


def check_torch() -> Finding:
    """Say what torch sees: version, threads, GPUs."""
    import torch

    found = f"{torch.__version__}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        return Finding("torch", "fine", f"{found}, {torch.cuda.device_count()} GPUs")
    if torch.version.cuda:
        cure = "built for CUDA: if there should be a GPU, see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        return Finding("torch", "look", f"{found}, no GPU", cure)
    return Finding("torch", "fine", f"{found}, no GPU (built without CUDA)")


def check_trainer() -> Finding:
    """Find whether `tonari train` works on this torch; a loop of one's own works on more."""
    try:
        from tonari import trainer
    except ImportError as error:
        # The message names the cure after the first semicolon.
        found, _, cure = str(error).removeprefix("trainer: ").partition("; ")
        return Finding("trainer", "look", found, cure)
    return Finding("trainer", "fine", f"works on this torch (torch{trainer.torch_range.RANGE})")


def check_launcher() -> Finding:
    """Name launcher and PMI, and list the variables; whether they agree is for the world to say."""
    seen = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if (name.startswith(LAUNCHER_PREFIXES) or name in (*LAUNCHER_NAMES, *SHOWN_NAMES))
        # Cray's PMI_SHARED_SECRET, PMIx's security keys.
        and "SECRET" not in name
        and "SECURITY" not in name
    ]
    if not seen:
        return Finding("launcher", "fine", "none")
    words = f"{find_launcher(os.environ).name}, {describe_pmi(os.environ)}"
    return Finding("launcher", "fine", f"{words}: {', '.join(seen)}")
