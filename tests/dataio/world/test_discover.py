"""Which launcher's variables lead to which world, and every way in which they can contradict."""

import os
import subprocess
import sys

import pytest

from dataio.base.errors import WorldError
from dataio.world import Topology, World, discover, discover_world, run_threads, thread_worlds
from dataio.world.discover import Medium, choose_medium
from dataio.world.launchers import Claim, describe_pmi, find_launcher, shown_variables

PREFIXES = (
    "PMI", "OMPI_", "MPI_", "SLURM_", "TORCHELASTIC_", "TONARI_", "HYDI_", "FLUX_", "JSM_", "PALS_",
    "PJM_", "MV2_",
)  # fmt: skip
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE")
PMI = {"PMI_RANK": "1", "PMI_SIZE": "4"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"}
JSM = {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4"}
TORCH = Claim(1, 4, "torch.distributed (rank 1 of 4)")
TORCH_ALONE = Claim(0, 1, "torch.distributed (rank 0 of 1)")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in NAMES:
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("environ", "torch", "medium"),
    [
        ({}, None, "single"),
        ({}, TORCH_ALONE, "single"),
        ({}, TORCH, "torch"),
        (PMI, None, "mpi"),
        (PMI, TORCH, "mpi"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None, "single"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, TORCH, "torch"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, None, "mpi"),
        ({"PMIX_RANK": "0"}, None, "mpi"),
        ({"PMIX_RANK": "1", **SLURM}, None, "mpi"),
        ({"PMIX_RANK": "0", **SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None, "single"),
        ({**PMI, "RANK": "1", "WORLD_SIZE": "4"}, None, "mpi"),
        (TORCHRUN, TORCH, "torch"),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, None, "single"),
        # One torchrun on each node, each started by srun or mpiexec.
        ({**TORCHRUN, **PMI, "GROUP_WORLD_SIZE": "4"}, Claim(1, 16, ""), "torch"),
        ({**TORCHRUN, **SLURM}, TORCH, "torch"),
        # Cray's plug-in of Slurm: once without, later with PMI_RANK and PMI_SIZE.
        ({**SLURM, "PALS_RANKID": "1", "PMI_CONTROL_PORT": "20000"}, None, "mpi"),
        ({**SLURM, "SLURM_NTASKS": "1", "PALS_RANKID": "0"}, None, "single"),
        ({"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0"}, None, "mpi"),
        (JSM, None, "mpi"),
        ({**JSM, "JSM_NAMESPACE_SIZE": "1", "JSM_NAMESPACE_RANK": "0"}, None, "single"),
        ({**FLUX, **PMI}, None, "mpi"),
        ({**FLUX, "PMIX_RANK": "1"}, None, "mpi"),
        (FLUX, TORCH, "torch"),
        # One task of a Flux whose brokers srun has started.
        ({**SLURM, "FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}, None, "single"),
        ({"PJM_JOBID": "7", "PMIX_RANK": "0"}, None, "mpi"),
        ({"PJM_JOBID": "7"}, None, "single"),
        # In a batch script SLURM_NTASKS is what was asked for, not what runs.
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None, "single"),
    ],
)
def test_the_medium_follows_from_the_launcher(
    environ: dict[str, str], torch: Claim | None, medium: Medium
) -> None:
    assert choose_medium(environ, torch) == medium


@pytest.mark.parametrize(
    ("environ", "torch", "message"),
    [
        (TORCHRUN, None, r"RANK=1 and WORLD_SIZE=4 .* torch.distributed.init_process_group first"),
        (SLURM, None, r"SLURM_STEP_ID=0 with 4 tasks.*alone; start with srun --mpi=pmi2"),
        (SLURM, TORCH_ALONE, r"4 tasks.*alone"),
        (FLUX, None, r"FLUX_TASK_RANK=1 with 4 tasks.*alone; start with flux run -o pmi=simple"),
        (FLUX, TORCH_ALONE, r"FLUX_JOB_SIZE.*alone"),
        (
            {**PMI, "RANK": "0", "WORLD_SIZE": "4"},
            None,
            r"disagree: MPI says PMI_RANK=1 and PMI_SIZE=4, torch RANK=0 and WORLD_SIZE=4.*use one",
        ),
        ({**PMI, "RANK": "1", "WORLD_SIZE": "2"}, None, r"MPI and torch disagree"),
        (
            {**PMI, **TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
            TORCH_ALONE,
            r"PMI_SIZE=4, but torchrun counts 1 .*GROUP_WORLD_SIZE.*--nnodes=4",
        ),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, None, r"PMI_RANK='x', expected a whole number >= 0"),
        ({"PMI_RANK": "0", "PMI_SIZE": "0"}, None, r"PMI_SIZE='0', expected .* >= 1; set it right"),
    ],
)
def test_what_cannot_be_is_refused(
    environ: dict[str, str], torch: Claim | None, message: str
) -> None:
    with pytest.raises(WorldError, match=message):
        choose_medium(environ, torch)


def test_a_plain_process_is_a_world_of_one() -> None:
    world = discover_world(timeout_s=5)
    assert (world.world_size, world.timeout_s, world.replicas_per_node) == (1, 5, (1,))


def test_mpi_without_mpi4py_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PMI.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "dataio.world.mpi", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(WorldError, match=r"PMI_RANK=1 and PMI_SIZE=4 .*pip install .*\[mpi\]'"):
        discover_world()


@pytest.mark.parametrize(
    ("environ", "claim"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
        ({**SLURM, "PALS_RANKID": "0"}, "PALS_RANKID=0 and SLURM_NTASKS=4"),
        ({**JSM, "JSM_NAMESPACE_RANK": "0"}, "JSM_NAMESPACE_SIZE=4"),
        # Counts only itself, so that nobody claims a number of ranks.
        ({"PALS_RANKID": "1"}, "PALS_RANKID=1"),
    ],
)
def test_an_mpi_that_is_not_the_launchers_is_an_error(environ: dict[str, str], claim: str) -> None:
    pytest.importorskip("mpi4py")
    # Launchers that the MPI of the test environment does not know: it starts alone.
    program = "from dataio.world import discover_world; discover_world()"
    from mpi4py import get_config

    if "open" in str(get_config()).lower():
        pytest.skip("mpi4py is built against Open MPI")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert f"{claim}, but mpi4py finds itself rank 0 of 1" in done.stderr
    assert "use the launcher of mpi4py's MPI" in done.stderr


@pytest.mark.parametrize(
    ("environ", "name", "pmi"),
    [
        ({**TORCHRUN, **SLURM}, "torchrun", "no PMI"),
        ({**SLURM, **PMI, "PMI_FD": "5"}, "srun", "PMI-1 or PMI-2"),
        ({**SLURM, "PALS_RANKID": "1", "PMI_CONTROL_PORT": "20000"}, "srun", "Cray's PMI"),
        # MPICH's mpiexec starts its helpers by srun.
        ({**SLURM, **PMI, "MPI_LOCALRANKID": "1"}, "mpiexec", "no PMI"),
        ({**FLUX, **SLURM, "PMI_FD": "5"}, "flux run", "PMI-1 or PMI-2"),
        ({**JSM, "PMIX_RANK": "1"}, "jsrun", "PMIx"),
        ({**PMI, "PALS_RANKID": "1"}, "PALS mpiexec", "no PMI"),
        ({"PJM_JOBID": "7", "PMIX_RANK": "1"}, "PJM mpiexec", "PMIx"),
        ({}, "by hand", "no PMI"),
    ],
)
def test_launcher_and_pmi_are_named(environ: dict[str, str], name: str, pmi: str) -> None:
    assert find_launcher(environ).name == name
    assert describe_pmi(environ) == pmi


def test_no_message_shows_a_secret() -> None:
    environ = {"PMI_SHARED_SECRET": "123", "PMI_RANK": "0"}
    assert shown_variables(environ) == "PMI_RANK=0"


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_a_wrong_number_of_ranks_per_node_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("TONARI_RANKS_PER_NODE", text)
    with pytest.raises(WorldError, match=rf"TONARI_RANKS_PER_NODE='{text}', expected"):
        discover_world()
    with pytest.raises(ValueError, match="ranks_per_node is 0, must be >= 1"):
        discover_world(ranks_per_node=0)


def test_simulated_nodes_hold_consecutive_ranks() -> None:
    worlds = thread_worlds([5])
    found = run_threads(worlds, lambda world: discover._find_nodes(world, 2))
    assert found == [Topology((0, 0, 1, 1, 2))] * 5


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ""),
        ({"SLURM_TOPOLOGY_ADDR": "n1.site", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, ""),
        ({"SLURM_TOPOLOGY_ADDR": "s.s2.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"},
         "s.s2"),
        ({"SLURM_TOPOLOGY_ADDR": "s.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node",
          "TONARI_RACK": "r7"}, "r7"),
    ],
)  # fmt: skip
def test_racks_are_known_by_what_the_launcher_left(monkeypatch, variables, expected) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for world in run_threads(thread_worlds([4]), discover_in_twos):
        assert world.topology.rack_of_node == (expected, expected)
        assert world.part([world.rank]).topology.rack_of_node == (expected,)


def discover_in_twos(world: World) -> World:
    return World(world._transport, discover._find_nodes(world, 2), timeout_s=1)


def test_ranks_that_were_told_different_nodes_are_an_error() -> None:
    with pytest.raises(WorldError, match="rank 0 was given None ranks per node, rank 2 2; pass"):
        run_threads(
            thread_worlds([3]),
            lambda world: discover._find_nodes(world, 2 if world.rank == 2 else None),
        )


def test_media_that_are_not_needed_are_not_imported() -> None:
    program = (
        "import sys; from dataio.world import discover_world; discover_world();"
        "sys.exit(str([name for name in sys.modules "
        "if name in ('dataio.world.torch', 'dataio.world.mpi')]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
