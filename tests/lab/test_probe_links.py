"""A probe between nodes finds what their links carry, and a plan from it is as good as by hand."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.loader.launch import mpiexec
from benchmarks.studies import step_time
from benchmarks.studies.step_memory import TEXT
from oracle.cluster.cluster import Cluster, Level
from oracle.cluster.probed import measure_link
from oracle.plan import plan_step
from oracle.probe.messages import EXCHANGE
from oracle.probe.probe import load_probe
from tests.lab import cluster
from tests.lab.cluster import Lab
from tests.lab.plan_on_links import OF_DATA
from tests.multirank import ROOT
from trainer.config.config import load_config

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


@pytest.fixture(autouse=True)
def _needs_lab() -> None:
    if reason := cluster.what_is_missing():
        pytest.skip(reason)


def run(*command: str, env: dict[str, str] = ENV) -> None:
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_links_are_found_and_a_job_of_other_ranks_is_planned_as_by_a_file_of_them(
    tmp_path: Path, record_property
) -> None:
    settings, steps = tmp_path / "run.toml", tmp_path / "steps.json"
    settings.write_text(TEXT)
    network, job = tmp_path / "network.json", tmp_path / "job.json"
    probes = [sys.executable, "-W", "ignore", "-m", "tonari", "probe", str(settings), *MODEL]
    probes += ["--no-data", "--world", "4", "--steps", "4"]
    with Lab(tmp_path / "lab", 2, rate=f"{MBIT}mbit") as lab:
        run(*lab.mpiexec(2), *probes, "--nodes", "2", "--out", str(network))
        run(
            *lab.mpiexec(4), sys.executable, "-W", "ignore", "-m", step_time.__name__, "--rank",
            str(steps), "--settings", str(settings), "--steps", "12", *MODEL,
        )  # fmt: skip
    own = {name: value for name, value in ENV.items() if name != "GLOO_SOCKET_IFNAME"}
    run(mpiexec(), "-n", "2", *probes, "--out", str(job), env=own)

    found = load_probe(network)
    gbyte_s, _ = measure_link(found.between)
    assert gbyte_s == pytest.approx(MBIT / 8e3, rel=0.1)
    # Both ways at once, by a transport that polls: no more than the link carries
    (rows,) = (each for each in found.between if each.kind == EXCHANGE)
    rate = (rows.num_bytes[-1] - rows.num_bytes[-2]) / (rows.seconds[-1] - rows.seconds[-2])
    assert MBIT * 125e3 / 2 < rate < MBIT * 125e3 * 1.1

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
        for machine in (by_hand, found)
    )
    measured_s = statistics.median(json.loads(steps.read_text()))
    figures = {
        "measured_s": measured_s, "file_s": file_s, "probe_s": probe_s, "gbyte_s": gbyte_s,
        "exchange": rate,
    }  # fmt: skip
    print(figures)
    record_property("figures", figures)
    off = abs(probe_s / measured_s - 1)
    assert off < abs(file_s / measured_s - 1) + 0.05, figures
