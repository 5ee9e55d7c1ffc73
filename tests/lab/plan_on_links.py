"""How right `tonari plan` is about a job of two nodes, by the rate of their links.

    python -m tests.lab.plan_on_links --train cifar10-test.parquet

Two nodes of the lab, a rank on each, train a small network with gradients and an exchange on the
same link. The plan knows a probe of this machine, with two ranks on it, and the links' rate.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.loader.launch import mpiexec
from oracle.cluster.cluster import Cluster, Level
from oracle.plan import StepPlan, plan_step
from oracle.probe.probe import Probe, load_probe
from tests.lab.cluster import Lab
from trainer.config.config import load_config

MBITS = (50, 100, 200, 400, 1000)
EXCHANGES = (0.0, 1.0)
EPOCHS = 3
TIMEOUT_S = 900
OF_DATA = 0.95
"""Of a link's rate, what is left for data once the headers of Ethernet, IP and TCP are off."""
SETTINGS = """
[data]
batch_size = 64
image_size = 32
[model]
kind = "resnet"
depth = 14
num_classes = 10
[optimizer]
lr = 0.05
[run]
device = "cpu"
checkpoint_epochs = 0
"""


def plan(found: Probe, settings: Path, overrides: Sequence[str], mbit: float) -> StepPlan:
    """Predict the job on two nodes whose processors are those of this machine."""
    levels = (
        Level(name="node", units=1),
        Level(name="switch", units=2, gbyte_s=mbit / 8e3 * OF_DATA, latency_us=100),
    )
    cluster = Cluster(name="lab", level=levels)
    config = load_config(settings, overrides)
    return plan_step(config, found, cluster=cluster, cores_of=(0, 0))


def train(
    directory: Path, settings: Path, overrides: Sequence[str], mbit: float
) -> list[dict[str, float]]:
    """Train on two nodes; the lines of the epochs but the first."""
    metrics = directory / "metrics.jsonl"
    with Lab(directory / "lab", 2, rate=f"{mbit:g}mbit") as lab:
        command = [
            *lab.mpiexec(2), sys.executable, "-m", "tonari", "train", str(settings), *overrides,
            f"data.cache={lab.scratch}", f"run.directory={directory / 'run'}", "--metrics",
            str(metrics), "--resume", "never",
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        if ended.returncode:
            raise RuntimeError(f"lab: the job ended with {ended.returncode}: {ended.stderr}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "epoch"][1:]


def main() -> None:
    """Compare at every rate, without an exchange and with one; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=Path, required=True, help="CIFAR-10 as Parquet")
    parser.add_argument("--mbits", type=float, nargs="+", default=MBITS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        settings, kept = directory / "run.toml", directory / "probe.json"
        settings.write_text(SETTINGS)
        base = [f"data.train={args.train.absolute()}", f"run.epochs={EPOCHS}"]
        command = [
            mpiexec(), "-n", "2", sys.executable, "-m", "tonari", "probe", str(settings), *base,
            f"data.cache={directory / 'probed'}", "--out", str(kept),
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, timeout=TIMEOUT_S)
        found = load_probe(kept)
        print("| Mbit/s | exchange | measured, s | again | predicted, s | error |\n|" + "---|" * 6)
        for mbit in args.mbits:
            for exchange in EXCHANGES:
                kind = f"shuffle.exchange={exchange}"
                expected = plan(found, settings, [*base, kind], mbit).epoch
                assert expected is not None
                expected_s = expected.epoch_s - expected.evaluation_s
                times = [e["epoch_s"] for e in train(directory, settings, [*base, kind], mbit)]
                cells = [
                    f"{mbit:g}", f"{exchange:g}", f"{times[0]:.2f}",
                    f"{times[1] / times[0] - 1:+.1%}", f"{expected_s:.2f}",
                    f"{2 * expected_s / sum(times) - 1:+.1%}",
                ]  # fmt: skip
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
