r"""What feeders save two nodes of half a core each, what losing some costs, and what was planned.

    python -m benchmarks.lab.feeders_on_nodes [--turns 3] [--kills 30]      # root, control groups

Nodes of the lab, joined by links of a given rate. On two of them a rank trains: a loader whose
threads have half a core, and a step that sleeps. Two others feed, of one process each, which are
not limited: with fewer than three cores they share what is left. Ways take turns, each with a
loader of its own on a warm cache: no feeder, one, two, and batches that lie in memory.

Then feeders are killed (SIGKILL) in mid-epoch, and others come, at times that follow from a seed.
Of each kill, ``lost`` is what the steps of the two seconds after it took longer than usual, in
steps; ``no kill`` the same of two seconds without one. ``planned`` is the time of a batch that
`tonari plan` tells, or the step, if that is longer: from a probe on a node of half a core, and a
cluster's file that has the link's rate.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash

import dataio
from benchmarks.lab.plan_of_epochs import OF_DATA
from benchmarks.studies.decode_beside import make_pictures
from dataio import discover_world
from dataio.world import World
from tests.lab.cluster import Lab, bytes_per_s, what_is_missing
from tests.multirank import ROOT
from tonari.report.machine import describe_machine
from tonari.report.tables import Table

RANKS, BATCH = 2, 32
FEEDERS = {"none": 0, "one": 1, "two": 2}
WAYS = (*FEEDERS, "memory")
EPOCHS = 2
"""Of a way at a time; the first is shown apart."""
WINDOW_S = 2.0
GROUPS, PERIOD_US = Path("/sys/fs/cgroup"), 10_000
SETTINGS = """
[data]
train = "{pictures}"
batch_size = {batch}
cache = "{cache}"
[data.workers]
threads = 1
[augment]
crop = "resized"
size = 224
flip = 0.5
[model]
kind = "benchmarks.lab.feeders_on_nodes:PooledMean"
[run]
device = "cpu"
directory = "{run}"
"""
CLUSTER = """
name = "lab"
[[level]]
name = "node"
units = 1
[[level]]
name = "switch"
units = {ranks}
gbyte_s = {gbyte_s}
"""
COLUMNS = (
    "way", "first epoch, s", "epoch, s", "beyond memory", "fed", "batches", "each row once",
    "parts lost", "planned, s", "error",
)  # fmt: skip
ENV = {
    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}", "GLOO_SOCKET_IFNAME": "eth0",
}  # fmt: skip
Epoch = dict[str, Any]


class PooledMean(torch.nn.Module):
    """A model that computes next to nothing, for the probe."""

    def __init__(self) -> None:
        super().__init__()
        pool = torch.nn.AvgPool2d(56)
        self.layers = torch.nn.Sequential(pool, torch.nn.Flatten(), torch.nn.Linear(48, 2))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        classes: torch.Tensor = self.layers(image)
        return classes


@contextlib.contextmanager
def limited(name: str, cores: float) -> Iterator[Path]:
    """Make a control group that may use so many cores: the file by which processes enter it."""
    is_old = (GROUPS / "cpu/cgroup.procs").exists()
    group = (GROUPS / "cpu" if is_old else GROUPS) / name
    quota = round(cores * PERIOD_US)
    try:
        group.mkdir()
        if is_old:
            (group / "cpu.cfs_period_us").write_text(f"{PERIOD_US}")
            (group / "cpu.cfs_quota_us").write_text(f"{quota}")
        else:
            (GROUPS / "cgroup.subtree_control").write_text("+cpu")
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise SystemExit(
            f"{group}: cannot be made to limit processors ({error.strerror}), expected control "
            "groups of version 1 or 2; run as root on a machine, or in a container that may"
        ) from error
    try:
        yield group / "cgroup.procs"
    finally:
        while (group / "cgroup.procs").read_text():
            time.sleep(0.1)
        group.rmdir()


# On a node that trains


def train(job: dict[str, Any]) -> None:
    """Train on one node, in all ways; leaves what it saw of each epoch."""
    found: list[Epoch] = []
    out = Path(job["out"])
    with discover_world(timeout_s=600) as world:
        with open_loader(world, job, "none"):
            pass  # it is staged
        Path(job["groups"][world.rank]).write_text(f"{os.getpid()}")
        for turn in range(job["turns"]):
            at = turn % len(WAYS)
            for way in WAYS[at:] + WAYS[:at]:
                found += run_way(world, job, way)
        while not any(world.allgather(b"x" * (out / "end").exists(), doing="go on")):
            found += run_way(world, job, "killed")
        (out / f"{world.rank}.json").write_text(json.dumps(found))


def open_loader(world: World, job: dict[str, Any], way: str) -> dataio.Loader:
    """Open a node's cache, and connect to the feeders of a way."""
    feeders = None if FEEDERS.get(way) == 0 or way == "memory" else Path(job["out"], way)
    return dataio.Loader(
        job["pictures"], batch_size=BATCH, cache=job["cache"], world=world,
        fields={"image": dataio.Image("jpg", crop=dataio.RandomResizedCrop(224), flip=0.5)},
        workers=dataio.Workers(threads=1, feeders=feeders),
        reports=dataio.Reports(progress=False),
    )  # fmt: skip


def run_way(world: World, job: dict[str, Any], way: str) -> Iterator[Epoch]:
    """Run some epochs in one way."""
    inside = Path(job["out"], "inside")
    with open_loader(world, job, way) as loader:
        held = next(iter(loader)) if way == "memory" else {}
        for epoch in loader.epochs(EPOCHS):
            world.barrier(doing="begin an epoch")
            digest, ids, ends, cores = xxhash.xxh3_128(), [], [time.monotonic()], []
            for step, batch in enumerate([held] * len(loader) if held else loader):
                for name in sorted(batch):
                    value = batch[name].numpy()
                    digest.update((np.moveaxis(value, 1, -1) if value.ndim > 1 else value).data)
                ids.append(batch["sample_id"].numpy())
                time.sleep(job["step_s"])
                ends.append(time.monotonic())
                cores.append(loader.stats().get("feeder_cores", 0))
                if way == "killed" and not world.rank and step == 4:
                    inside.touch()
                elif step == len(loader) * 3 // 4:
                    inside.unlink(missing_ok=True)
            seen = b"".join(world.allgather(np.concatenate(ids).tobytes(), doing="compare"))
            once = np.array_equal(np.sort(np.frombuffer(seen, np.int64)), range(job["rows"]))
            stats = loader.stats()
            yield {
                "way": way, "epoch": epoch, "ends": ends, "cores": cores, "once": once,
                "hash": digest.hexdigest(), "lost_parts": stats.get("feeder_lost_parts", 0),
                "fed": stats.get("feeder_rows", 0) / stats["rows"],
            }  # fmt: skip


# Beside them


class Feeding:
    """The nodes that feed.

    Args:
        lab: Of them.
        out: In which ways have their directories.
    """

    def __init__(self, lab: Lab, out: Path) -> None:
        self._lab, self._out = lab, out
        self._nodes = lab.nodes[RANKS:]
        self._started: list[subprocess.Popen[bytes]] = []
        self.killed_at: list[float] = []
        for way, count in (*FEEDERS.items(), ("killed", 2)):
            for node in self._nodes[:count]:
                self._start(node, way)

    def _start(self, node: str, way: str) -> None:
        """Start a feeder; returns once it serves."""
        directory = self._out / way
        before = {*directory.glob("feeder-*")}
        command = [sys.executable, "-m", "tonari", "feed", f"{directory}", "--cores", "1"]
        # What it takes to start would be taken from the others, which lie on this machine
        own, command = os.getpriority(os.PRIO_PROCESS, 0), ["nice", "-n", "19", *command]
        began = subprocess.Popen(
            [*self._lab.enter(node), *command], env=ENV, start_new_session=True
        )
        self._started.append(began)
        while not {*directory.glob("feeder-*")} - before:
            if began.poll() is not None:
                raise RuntimeError(f"{node}: a feeder ended with {began.returncode}")
            time.sleep(0.05)
        os.setpriority(os.PRIO_PGRP, began.pid, own)

    def kill(self, num: int, job: "subprocess.Popen[bytes]", seed: int = 0) -> None:
        """Kill all on a node in mid-epoch, and start another feeder there, so many times."""
        rng = np.random.default_rng(seed)
        while len(self.killed_at) < num and job.poll() is None:
            if not (self._out / "inside").exists():
                time.sleep(0.01)
                continue
            time.sleep(rng.uniform(0, 1))
            node = self._nodes[rng.integers(len(self._nodes))]
            self._lab.kill(node)
            self.killed_at.append(time.monotonic())
            time.sleep(WINDOW_S)
            self._start(node, "killed")
            # Ranks look for it every second
            time.sleep(rng.uniform(1.5, 3))
        (self._out / "end").touch()


def plan(lab: Lab, group: Path, job: dict[str, Any], settings: Path) -> list[dict[str, Any]]:
    """Probe a node of half a core, and plan the job with 0 to 2 feeders."""
    tonari = [sys.executable, "-W", "ignore", "-m", "tonari"]
    found, cluster = settings.with_name("probe.json"), settings.with_name("cluster.toml")
    gbyte_s = bytes_per_s(lab.rate) / 1e9 * OF_DATA
    cluster.write_text(CLUSTER.format(ranks=RANKS, gbyte_s=gbyte_s))
    probe = [*tonari, "probe", f"{settings}", "--world", f"{RANKS}", "--out", f"{found}"]
    within = ["sh", "-c", f'echo $$ > {group} && exec "$@"', "sh"]
    subprocess.run([*lab.enter("node0"), *within, *probe], env=ENV, check=True)
    command = [*tonari, "plan", f"{settings}", "--probe", f"{found}", "--cluster", f"{cluster}"]
    command += ["--feeders", "2", "--feeder-cores", "1"]
    subprocess.run(command, env=ENV, check=True)
    said = subprocess.check_output([*command, "--json"], env=ENV, text=True)
    planned: list[dict[str, Any]] = json.loads(said)["feeders"]
    return planned


# What was found


def later_s(both: Sequence[Sequence[Epoch]], way: str, *, epoch: int = 1) -> float:
    """Take the median of a way's epochs, each as long as that of the slower rank."""
    its = [ranks for ranks in both if (ranks[0]["way"], ranks[0]["epoch"]) == (way, epoch)]
    took_s = [[each["ends"][-1] - each["ends"][0] for each in ranks] for ranks in its]
    return float(np.median(np.max(took_s, axis=1)))


def lost_steps(ranks: Sequence[Epoch], at: float, usual_s: float) -> float:
    """Count in steps what those within a window took too long, on the rank that lost more."""
    lost = []
    for each in ranks:
        ends = np.array(each["ends"])
        are_in = (ends[1:] > at) & (ends[:-1] < at + WINDOW_S)
        lost.append(float(np.sum(np.diff(ends)[are_in] - usual_s)) / usual_s)
    return max(lost)


def report(
    both: Sequence[Sequence[Epoch]], planned: Sequence[dict[str, Any]], killed_at: Sequence[float],
    *, step_s: float,
) -> None:  # fmt: skip
    """Print what was measured, beside what was planned.

    Args:
        both: Of each epoch, what each rank saw.
        planned: With 0 feeders and more.
        killed_at: When feeders were killed.
        step_s: For which a step sleeps.
    """
    rows = []
    expected = {ranks[0]["epoch"]: hashes(ranks) for ranks in both if ranks[0]["way"] == "none"}
    num_steps = len(both[0][0]["ends"]) - 1
    for way in (*WAYS, "killed"):
        its = [ranks for ranks in both if ranks[0]["way"] == way]
        if not its:
            continue
        epoch_s, cells = later_s(both, way), ["", ""]
        if way in FEEDERS:
            planned_s = max(planned[FEEDERS[way]]["batch_s"], step_s) * num_steps
            cells = [f"{planned_s:.2f}", f"{planned_s / epoch_s - 1:+.1%}"]
        is_same = all(hashes(ranks) == expected[ranks[0]["epoch"]] for ranks in its)
        is_once = all(ranks[0]["once"] for ranks in its)
        fed = statistics.median(each["fed"] for ranks in its for each in ranks)
        rows.append([
            way, f"{later_s(both, way, epoch=0):.2f}", f"{epoch_s:.2f}",
            f"{epoch_s / later_s(both, 'memory') - 1:+.1%}", f"{fed:.0%}",
            *(["", ""] if way == "memory" else ["same" if is_same else "OTHERS", str(is_once)]),
            str(sum(each["lost_parts"] for ranks in its[1::EPOCHS] for each in ranks)), *cells,
        ])  # fmt: skip
    print("\n".join(Table(COLUMNS, rows).markdown()))
    if not killed_at:
        return
    calm = [ranks for ranks in both if ranks[0]["way"] == "two"]
    steps_s = [np.diff(each["ends"]) for ranks in calm for each in ranks]
    usual_s = float(np.median(np.concatenate(steps_s)))
    killed = [ranks for ranks in both if ranks[0]["way"] == "killed"]
    longest_s = max(float(np.diff(each["ends"]).max()) for ranks in killed for each in ranks)
    lost = [
        lost_steps(ranks, at, usual_s)
        for ranks in killed for at in killed_at if ranks[0]["ends"][0] < at < ranks[0]["ends"][-1]
    ]  # fmt: skip
    control = [
        lost_steps(ranks, at, usual_s)
        for ranks in calm
        for at in np.arange(ranks[0]["ends"][0], ranks[0]["ends"][-1] - WINDOW_S, WINDOW_S)
    ]
    joins = sum(int(np.sum(np.diff(ranks[0]["cores"][1:]) > 0)) for ranks in killed)
    print(json.dumps({
        "kills": len(lost), "joins": joins, "step_s": round(usual_s, 4),
        "longest_step_s": round(longest_s, 4),
        "longest_step_without_kills_s": round(max(float(each.max()) for each in steps_s), 4),
        "lost_steps": quantiles(lost), "lost_steps_no_kill": quantiles(control),
    }))  # fmt: skip


def hashes(ranks: Sequence[Epoch]) -> list[str]:
    """List what each rank's batches hash to."""
    return [each["hash"] for each in ranks]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Say the median, the 90th percentile, and the most."""
    return {
        "median": round(statistics.median(values), 2),
        "p90": round(float(np.quantile(values, 0.9)), 2), "most": round(max(values), 2),
    }  # fmt: skip


def main() -> None:
    """Bring up the lab, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=64, help="of an epoch")
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--rate", default="1gbit", help="of every link, as tc writes it")
    parser.add_argument("--cores", type=float, default=0.5, help="of a node that trains")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.node:
        train(json.loads(given.node))
        return
    if reason := what_is_missing():
        parser.error(reason)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tonari-lab-")))
        names = [f"tonari-{os.getpid()}-{rank}" for rank in range(RANKS)]
        groups = [stack.enter_context(limited(name, given.cores)) for name in names]
        print(describe_machine(directory), flush=True)
        lab = Lab(directory / "lab", RANKS + 2, given.rate)
        job = {
            "pictures": f"{directory}/pictures.parquet", "cache": f"{lab.scratch}/cache",
            "out": f"{directory}", "groups": [f"{group}" for group in groups],
            "rows": RANKS * BATCH * given.steps, "turns": given.turns, "step_s": given.step_s,
        }  # fmt: skip
        path = make_pictures(Path(job["pictures"]), job["rows"], 375, 500)
        table = pq.read_table(path)
        pq.write_table(table.append_column("cls", pa.array(np.zeros(len(table), int))), path)
        settings = directory / "run.toml"
        settings.write_text(SETTINGS.format(batch=BATCH, run=directory / "run", **job))
        stack.enter_context(lab)
        for node in lab.nodes:
            # Longer than what a link passes at once, segments would be cut by the processor
            lab.run(node, "ip", "link", "set", "eth0", "gso_max_size", "32768")
        planned = plan(lab, groups[0], job, settings)
        feeding = Feeding(lab, directory)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.lab.feeders_on_nodes"]
        command = [*lab.mpiexec(RANKS), *command, "--node", json.dumps(job)]
        running = subprocess.Popen(command, env=ENV)
        feeding.kill(given.kills, running)
        if running.wait():
            raise RuntimeError(f"lab: the ranks that train ended with {running.returncode}")
        ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]
        report(list(zip(*ranks, strict=True)), planned, feeding.killed_at, step_s=given.step_s)
        print(f"load {os.getloadavg()}")


if __name__ == "__main__":
    main()
