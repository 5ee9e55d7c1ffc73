r"""Is the mesh that `tonari plan` puts first also the one whose steps are the shortest?

    python -m benchmarks.lab.plan_choice [--only "gpt on lab"] [--json-file out.json]

Six jobs: three models on one node of two ranks, and each on two nodes of the lab with two ranks
each, joined by slow links. `tonari probe --try` times all meshes in question on one node, the plan
orders them; then each is trained on made-up batches, in rounds, so that a slower minute of
the machine meets all. A step always has the same rows. What counts is how much longer a step of the
first in the plan takes than that of the best one measured; and what those take that one would
choose without a plan.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import spearmanr

from benchmarks.lab.plan_of_epochs import OF_DATA
from benchmarks.studies import step_time
from benchmarks.studies.step_memory import IMAGES, TEXT
from tests.lab.cluster import Lab
from tonari.mpi import mpiexec_command
from tonari.oracle.cluster.cluster import Cluster, Level
from tonari.oracle.plan import plan_step
from tonari.oracle.probe.probe import load_probe
from tonari.plan.choice import find_probes
from tonari.trainer.config.config import load_config

TIMEOUT_S = 900
MODELS = {
    "gpt": (TEXT, 8, step_time.GPT),
    "llama": (TEXT, 8, step_time.LLAMA),
    "vit": (IMAGES, 16, step_time.VIT),
}
"""The file, the rows of a step, and the settings."""
MBITS = {"gpt": 300, "llama": 1000, "vit": 100}
"""Of the links in the lab."""

DP = "dp only"
TP = "tp inside a node"
PIPELINE = ("mesh.pp=2", "mesh.microbatches=4")
ON_ONE = {
    DP: ("mesh.dp_replicate=2",),
    "fsdp": ("mesh.dp_shard=2",),
    TP: ("mesh.tp=2",),
    "tp, sequence": ("mesh.tp=2", "mesh.sequence_parallel=true"),
    "pp": PIPELINE,
    "pp, 8 microbatches": ("mesh.pp=2", "mesh.microbatches=8"),
    "pp, gpipe": (*PIPELINE, "mesh.schedule=gpipe"),
    "pp, zbv": (*PIPELINE, "mesh.schedule=zbv"),
    "pp, interleaved": (*PIPELINE, "mesh.schedule=interleaved"),
}
ON_TWO = {
    DP: ("mesh.dp_replicate=4",),
    "fsdp": ("mesh.dp_shard=4",),
    "hsdp": ("mesh.dp_replicate=2", "mesh.dp_shard=2"),
    TP: ("mesh.dp_replicate=2", "mesh.tp=2"),
    "pp, dp": (*PIPELINE, "mesh.dp_replicate=2"),
    "pp, fsdp": (*PIPELINE, "mesh.dp_shard=2"),
    "pp, tp": (*PIPELINE, "mesh.tp=2"),
    "pp, dp, gpipe": (*PIPELINE, "mesh.dp_replicate=2", "mesh.schedule=gpipe"),
    "pp, dp, zbv": (*PIPELINE, "mesh.dp_replicate=2", "mesh.schedule=zbv"),
    "pp 4": ("mesh.pp=4", "mesh.microbatches=4"),
}


@dataclass(frozen=True)
class PlannedPair:
    """A model, and how many nodes of two ranks it is trained on."""

    model: str
    nodes: int

    @property
    def name(self) -> str:
        where = "one node" if self.nodes == 1 else f"lab, {MBITS[self.model]} Mbit/s"
        return f"{self.model} on {where}"

    def meshes(self) -> dict[str, tuple[str, ...]]:
        """List the meshes in question, each with its rows of a replica's batch."""
        _, rows, _ = MODELS[self.model]
        found = {}
        for name, words in (ON_ONE if self.nodes == 1 else ON_TWO).items():
            sizes = dict(word.split("=") for word in words)
            replicas = int(sizes.get("mesh.dp_replicate", 1)) * int(sizes.get("mesh.dp_shard", 1))
            found[name] = (*words, f"data.batch_size={rows // replicas}")
        return found


PAIRS = tuple(PlannedPair(model, nodes) for nodes in (1, 2) for model in MODELS)
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def plan(pair: PlannedPair, directory: Path) -> dict[str, float]:
    """Probe the meshes, and plan each: seconds of a step by name."""
    text, _, model = MODELS[pair.model]
    settings, probes = directory / "run.toml", directory / f"probes-{pair.model}-{pair.nodes}"
    settings.write_text(text)
    meshes = pair.meshes()
    tries = [word for words in meshes.values() for word in ("--try", " ".join(words))]
    tonari = [sys.executable, "-W", "ignore", "-m", "tonari"]
    subprocess.run(
        [
            *mpiexec_command(2), *tonari, "probe", str(settings), *model, "--no-data", *tries,
            "--steps", "4", "--rounds", "2", "--world", str(2 * pair.nodes), "--out", str(probes),
        ], check=True, env=ENV, timeout=len(meshes) * TIMEOUT_S, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    # Its nodes have the processors of one machine, as no real ones have
    cluster = None if pair.nodes == 1 else _lab(MBITS[pair.model])
    cores_of = () if cluster is None else (0,) * cluster.world_size
    names = {frozenset(words): name for name, words in meshes.items()}
    found = {}
    for path in find_probes(probes):
        probe = load_probe(path)
        config = load_config(settings, probe.overrides)
        own = names[frozenset(probe.overrides) - {*model}]
        found[own] = plan_step(config, probe, cluster=cluster, cores_of=cores_of).step_s
    return found


def _lab(mbit: float) -> Cluster:
    levels = (
        Level(name="node", units=2),
        Level(name="switch", units=2, gbyte_s=mbit / 8e3 * OF_DATA, latency_us=100),
    )
    return Cluster(name="lab", level=levels)


def measure(pair: PlannedPair, directory: Path, *, rounds: int, steps: int) -> dict[str, float]:
    """Train each mesh, in rounds: the median seconds of a step, by name."""
    settings, out = directory / "run.toml", directory / "steps.json"
    found: defaultdict[str, list[float]] = defaultdict(list)
    with ExitStack() as opened:
        launcher = mpiexec_command(2)
        env = ENV
        if pair.nodes > 1:
            rate = f"{MBITS[pair.model]}mbit"
            lab = opened.enter_context(Lab(directory / "lab", pair.nodes, rate=rate))
            launcher, env = lab.mpiexec(2 * pair.nodes), {**ENV, "GLOO_SOCKET_IFNAME": "eth0"}
        for _ in range(rounds):
            for name, words in pair.meshes().items():
                command = [
                    *launcher, sys.executable, "-W", "ignore", "-m", step_time.__name__, "--rank",
                    str(out), "--settings", str(settings), "--steps", str(steps),
                    *MODELS[pair.model][2], *words,
                ]  # fmt: skip
                subprocess.run(command, check=True, env=env, timeout=TIMEOUT_S)
                found[name] += json.loads(out.read_text())
    return {name: statistics.median(times) for name, times in found.items()}


def compare(
    pair: PlannedPair, planned: dict[str, float], measured: dict[str, float]
) -> dict[str, object]:
    """Compare what the plan's first takes with the best one measured, and what others would."""
    best_s = min(measured.values())
    chosen = min(planned, key=planned.__getitem__)
    names = list(measured)
    ranked = spearmanr([planned[n] for n in names], [measured[n] for n in names])
    return {
        "pair": pair.name,
        "meshes": len(measured),
        "chosen": chosen,
        "best": min(measured, key=measured.__getitem__),
        "over_best": measured[chosen] / best_s - 1,
        "dp_over_chosen": measured[DP] / measured[chosen] - 1,
        "tp_over_chosen": measured[TP] / measured[chosen] - 1,
        "rank_correlation": float(ranked.statistic),
        "planned_s": planned,
        "measured_s": measured,
    }


SHOWN = (
    "{pair}: of {meshes} meshes the plan puts {chosen} first, {over_best:+.1%} over the best, "
    "{best}; dp only {dp_over_chosen:+.0%}, tp inside a node {tp_over_chosen:+.0%}; rank "
    "correlation {rank_correlation:.2f}"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Plan and measure each pair; print one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="pairs whose names contain this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="timed in each round")
    parser.add_argument("--json-file", type=Path)
    given = parser.parse_args(argv)
    lines = []
    with tempfile.TemporaryDirectory() as name:
        for pair in PAIRS:
            if given.only not in pair.name:
                continue
            planned = plan(pair, Path(name))
            measured = measure(pair, Path(name), rounds=given.rounds, steps=given.steps)
            lines.append(compare(pair, planned, measured))
            print(SHOWN.format(**lines[-1]), flush=True)
            for each, seconds in sorted(measured.items(), key=lambda item: item[1]):
                print(f"  {each:20} {seconds:7.3f} s, planned {planned[each]:7.3f} s", flush=True)
            if given.json_file:
                given.json_file.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
