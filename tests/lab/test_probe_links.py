"""A probe between nodes finds what their links carry, and a plan from it is as good as by hand."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab.plan_of_epochs import OF_DATA
from benchmarks.studies import step_time
from benchmarks.studies.step_memory import TEXT
from tests.lab import cluster
from tests.lab.cluster import Lab
from tests.multirank import ROOT
from tonari.mpi import mpiexec_command
from tonari.oracle.cluster.cluster import Cluster, Level
from tonari.oracle.cluster.probed import measure_link
from tonari.oracle.plan import plan_step
from tonari.oracle.probe.messages import EXCHANGE
from tonari.oracle.probe.probe import Probe, load_probe
from tonari.trainer.config.config import load_config

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]

MBIT = 300
MODEL = (
    "model.kind=gpt", "model.width=256", "model.depth=2", "model.heads=4", "model.vocabulary=2048",
    "data.sequence_length=32", "mesh.dp_replicate=4", "data.batch_size=4",
)  # fmt: skip
ENV = {
    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0"
}  # fmt: skip
TIMEOUT_S = 600


def run(*command: str, env: dict[str, str] = ENV) -> None:
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def probe_of(settings: Path, out: Path) -> list[str]:
    return [
        sys.executable, "-W", "ignore", "-m", "tonari", "probe", str(settings), *MODEL, "--no-data",
        "--world", "4", "--steps", "4", "--out", str(out),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a job; beside it what is found."""
    if reason := cluster.what_is_missing():
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("links") / "run.toml"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def network(settings: Path) -> Probe:
    """A probe of two nodes of a rank each."""
    out = settings.with_name("network.json")
    with Lab(settings.with_name("probed"), 2, rate=f"{MBIT}mbit") as lab:
        run(*lab.mpiexec(2), *probe_of(settings, out), "--nodes", "2")
    return load_probe(out)


def test_what_links_carry_is_found_within_a_tenth(network: Probe) -> None:
    gbyte_s, _ = measure_link(network.between)
    print(f"{gbyte_s:.4g} GB/s")
    assert gbyte_s == pytest.approx(MBIT / 8e3, rel=0.1)
    # Both ways at once, by a transport that polls: no more than the link carries
    (rows,) = (each for each in network.between if each.kind == EXCHANGE)
    rate = (rows.num_bytes[-1] - rows.num_bytes[-2]) / (rows.seconds[-1] - rows.seconds[-2])
    assert MBIT * 125e3 / 2 < rate < MBIT * 125e3 * 1.1


def test_a_job_of_other_ranks_is_planned_as_well_as_by_a_file(
    settings: Path, network: Probe
) -> None:
    steps, job = settings.with_name("steps.json"), settings.with_name("job.json")
    with Lab(settings.with_name("trained"), 2, rate=f"{MBIT}mbit") as lab:
        run(
            *lab.mpiexec(4), sys.executable, "-W", "ignore", "-m", step_time.__name__, "--rank",
            str(steps), "--settings", str(settings), "--steps", "12", *MODEL,
        )  # fmt: skip
    own = {name: value for name, value in ENV.items() if name != "GLOO_SOCKET_IFNAME"}
    run(*mpiexec_command(2), *probe_of(settings, job), env=own)
    by_hand = Cluster(
        name="lab",
        level=(
            Level(name="node", units=2),
            Level(name="switch", units=2, gbyte_s=MBIT / 8e3 * OF_DATA, latency_us=100),
        ),
    )
    config, of_job = load_config(settings, MODEL), load_probe(job)
    # The lab's nodes have the processors of one machine
    shared = (0,) * 4
    file_s, probe_s = (
        plan_step(config, of_job, cluster=machine, cores_of=shared).step_s
        for machine in (by_hand, network)
    )
    measured_s = statistics.median(json.loads(steps.read_text()))
    figures = {"measured_s": measured_s, "file_s": file_s, "probe_s": probe_s}
    print(figures)
    assert abs(probe_s / measured_s - 1) < abs(file_s / measured_s - 1) + 0.05, figures
