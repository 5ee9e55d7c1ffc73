"""What `tonari doctor` looks at beside the machine: fabric, MPI's way, where Python's files lie."""

import os
import resource
import sys
import time
from pathlib import Path

from dataio.base.filesystem import Filesystem, filesystem_of
from tonari.checks import Finding
from tonari.sizes import format_bytes

SYSTEM = Path("/sys/class")
MAPS = Path("/proc/self/maps")
SLINGSHOT_LIBRARIES = ("libcxi",)
INFINIBAND_LIBRARIES = (
    "libibverbs", "libmlx5", "libuct_ib", "libpsm2", "libpsm3", "libefa", "libopx",
)  # fmt: skip
TRANSPORT_LIBRARIES = ("libucp", "libfabric", *SLINGSHOT_LIBRARIES, *INFINIBAND_LIBRARIES)
TRANSPORT_VARIABLES = (
    "UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER", "FI_TCP_IFACE", "MPIR_CVAR_CH4_NETMOD",
    "OMPI_MCA_pml", "OMPI_MCA_btl", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
)  # fmt: skip
LOW_MEMORY_LOCK_BYTES = 1 << 30
SLOW_IMPORT_S = 20.0


def fabric_ports(system: Path = SYSTEM) -> dict[str, str]:
    """List the ports of InfiniBand, RoCE, Omni-Path and Slingshot with state and rate."""
    found = {}
    for port in sorted(system.glob("infiniband/*/ports/*")):
        name = f"{port.parent.parent.name}:{port.name}"
        # "4: ACTIVE"
        state = _read(port / "state").rpartition(": ")[2]
        found[name] = " ".join(filter(None, (state, _read(port / "rate"))))
    for device in sorted(system.glob("cxi/*")):
        link = _read(device / "device" / "properties" / "link_state") or _read(
            device / "link_state"
        )
        found[device.name] = "ACTIVE" if link.lower() in ("", "up") else link
    return found


def check_fabric(ports: dict[str, str]) -> Finding:
    """See that the ports that are there are up."""
    if not ports:
        return Finding("fabric", "fine", "no InfiniBand or Slingshot here: messages go over TCP")
    found = ", ".join(f"{name} {state}" for name, state in ports.items())
    if any(state.startswith("ACTIVE") for state in ports.values()):
        return Finding("fabric", "fine", found)
    cure = "no port is up: ask the administrator, or take another node (sbatch --exclude)"
    return Finding("fabric", "look", found, cure)


def check_memory_lock(soft: int, ports: dict[str, str]) -> Finding:
    """Compare the limit of locked memory with what a fabric registers."""
    unlimited = soft == resource.RLIM_INFINITY
    found = "no limit" if unlimited else f"limit {format_bytes(soft)}"
    if unlimited or not ports or soft >= LOW_MEMORY_LOCK_BYTES:
        return Finding("memory lock", "fine", found)
    cure = (
        "the fabric needs more: `ulimit -l unlimited` before the job, else ask the administrator "
        "(limits.conf, in Slurm LimitMEMLOCK of slurmd and PropagateResourceLimitsExcept=MEMLOCK)"
    )
    return Finding("memory lock", "look", found, cure)


def check_python_home(home: Filesystem, import_s: float | None) -> Finding:
    """See where Python's packages lie, and how long the first import of torch took.

    Args:
        home: The filesystem that holds torch.
        import_s: None if it had been imported before.
    """
    took = "" if import_s is None else f", import torch {import_s:.1f} s"
    found = f"{sys.prefix} on {home.type}{took}"
    if home.is_shared:
        cure = (
            "each process reads thousands of small files from a shared filesystem: put the "
            "environment into one squashfs or container image, or copy it to the node's own disk "
            "when the job starts"
        )
        return Finding("Python's files", "look", found, cure)
    if import_s is not None and import_s > SLOW_IMPORT_S:
        cure = "slow for a node's own disk: see what else reads from it, and start it a second time"
        return Finding("Python's files", "look", found, cure)
    return Finding("Python's files", "fine", found)


def python_home() -> Finding:
    """Import torch, and judge where it comes from."""
    import_s = None
    if "torch" not in sys.modules:
        started = time.perf_counter()
        import torch  # noqa: F401

        import_s = time.perf_counter() - started
    where = Path(sys.modules["torch"].__file__ or sys.prefix)
    return check_python_home(filesystem_of(where), import_s)


def check_transport(medium: str, loaded: list[str], ports: dict[str, str]) -> Finding:
    """Compare the libraries that messages go through with the fabric that is there.

    Args:
        medium: MPI library or torch's backend, in words.
        loaded: Libraries of transports that this process has loaded.
        ports: Of ``fabric_ports``.
    """
    seen = [f"{name}={os.environ[name]}" for name in TRANSPORT_VARIABLES if name in os.environ]
    found = "; ".join([medium, ", ".join(loaded) or "no transport library loaded", *seen])
    # Gloo knows TCP alone; NCCL finds the fabric itself.
    through_mpi = "gloo" not in medium
    up = [name for name, state in ports.items() if through_mpi and state.startswith("ACTIVE")]
    slingshot = any(name.startswith("cxi") for name in up)
    needed = SLINGSHOT_LIBRARIES if slingshot else INFINIBAND_LIBRARIES
    if up and not any(name.startswith(needed) for name in loaded):
        cure = (
            "the fabric is not used: messages go over TCP; build mpi4py with the site's MPI module "
            "(pip install --no-binary mpi4py --force-reinstall mpi4py), and start with its launcher"
        )
        return Finding("transport", "look", found, cure)
    return Finding("transport", "fine", found)


def loaded_libraries(maps: Path = MAPS) -> list[str]:
    """Name the transports' libraries that this process has loaded."""
    lines = maps.read_text().splitlines() if maps.exists() else []
    names = {Path(line.rpartition(" ")[2]).name.partition(".so")[0] for line in lines}
    # Wheels rename what they bundle: libucp-9f3a1c2b.
    return sorted(
        {name.partition("-")[0] for name in names if name.startswith(TRANSPORT_LIBRARIES)}
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
