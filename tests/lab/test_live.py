"""On nodes of their own: whatever node is lost at whatever moment, the others train on, rightly."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dataio.job.live_ranks import EPOCHS, write_samples
from tests.dataio.job.test_live import check, said, steps_of
from tests.lab import cluster, parallel_fs
from tests.lab.cluster import Lab
from tests.lab.parallel_fs import ParallelFs, start_parallel_fs
from tests.multirank import ROOT
from tonari.cli import main

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]
NODES, SAMPLES, LIMIT_S = 4, 240, 300.0
Report = dict[str, Any]


class Nodes:
    """A lab whose nodes run one job after another.

    Attributes:
        fs: What all of them see.
    """

    def __init__(self, fs: ParallelFs) -> None:
        self.fs, self.number = fs, 0
        self._agents = [self._agent(node) for node in fs.lab.nodes]
        for agent in self._agents:
            assert self._read(agent) == b"ready\n"

    def _agent(self, node: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [*self.fs.lab.enter(node), sys.executable, "-m", "tests.lab.live_on_nodes"],
            bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def _read(self, agent: "subprocess.Popen[bytes]") -> bytes:
        assert agent.stdout is not None
        assert select.select([agent.stdout], [], [], LIMIT_S)[0], "a node's ranks did not end"
        return agent.stdout.readline()

    def start(
        self, out: Path, faults: dict[int, list[Any]], *, on: Sequence[int] = range(NODES),
        a_node: int = 1, **options: Any,
    ) -> list[list[int]]:  # fmt: skip
        """Start a job with so many ranks a node; returns the process ids of each node."""
        self.number += 1
        samples = out / "samples.parquet"
        write_samples(samples, SAMPLES)
        os.utime(samples, (0, 0))  # the parallel filesystem keeps whole seconds
        self.fs.lab.run("node0", "mkdir", str(self.shared))
        self.fs.lab.run("node0", "cp", "-p", str(samples), str(self.shared))
        given = {"shared": str(self.shared), "cache": f"{self.fs.lab.scratch}/job-{self.number}",
                 "timeout_s": 20.0, **options}  # fmt: skip
        environ = {"WORLD_SIZE": str(len(on) * a_node), "MASTER_ADDR": f"node{on[0]}",
                   "MASTER_PORT": str(29500 + self.number)}  # fmt: skip
        for node, agent in enumerate(self._agents):
            ranks = ranks_of([on.index(node)], a_node) if node in on else []
            line = {"out": str(out), "options": given, "environ": environ,
                    "ranks": {rank: faults.get(rank, []) for rank in ranks}}  # fmt: skip
            assert agent.stdin is not None
            agent.stdin.write(json.dumps(line).encode() + b"\n")
            agent.stdin.flush()
        return [json.loads(self._read(agent)) for agent in self._agents]

    @property
    def shared(self) -> Path:
        """The directory of the last job on the parallel filesystem."""
        return self.fs.path / f"job-{self.number}"

    def wait(self) -> dict[int, int]:
        """Wait for all ranks; returns their exit statuses."""
        statuses = [json.loads(self._read(agent)) for agent in self._agents]
        return {int(rank): status for each in statuses for rank, status in each.items()}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    if reason := cluster.what_is_missing() or parallel_fs.what_is_missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(tmp_path_factory.mktemp("nodes") / "lab", NODES, "1gbit"))
        yield Nodes(start_parallel_fs(lab, "1gbit"))


def at_step(out: Path, number: int) -> None:
    """Wait until a step has counted."""
    until_s = time.monotonic() + LIMIT_S
    while len(steps_of(out, 0)) < number:
        assert time.monotonic() < until_s, said(out, 0)
        time.sleep(0.01)


def ranks_of(nodes: Sequence[int], a_node: int) -> list[int]:
    return [rank for node in nodes for rank in range(node * a_node, (node + 1) * a_node)]


def audit(
    nodes: Nodes, out: Path, statuses: dict[int, int], left: Sequence[int], num_ranks: int = NODES
) -> Report:
    """Check that those that were left trained rightly; returns what the loss cost."""
    assert [statuses[rank] for rank in left] == [0] * len(left), said(out, left[0])
    ranks, step = check(out, num_ranks, left=[*left], num_samples=SAMPLES)[-1]
    assert ranks == [*left]
    nodes.fs.lab.run("node0", "cp", "-rp", str(nodes.shared / "rows"), str(out / "rows"))
    certificate = out / "certificate.json"
    assert not main(["certify", str(out / "rows"), "--exactly-once", "--out", str(certificate),
                     "--source", str(out / "samples.parquet")])  # fmt: skip
    epochs = json.loads(certificate.read_text())["claims"]["exactly_once"]["epochs"]
    assert [epoch["trained_once"] for epoch in epochs] == [SAMPLES] * EPOCHS
    after = [each[-1] for rank in left for each in steps_of(out, rank) if each[0] > step]
    ends = [json.loads((out / f"end-{rank}.json").read_text()) for rank in left]
    read = {name: sum(end[n] for end in ends) for n, name in ((2, "source_bytes"), (3, "rows"))}
    return {"step": step, "first": min(after), **read}


def restarted(nodes: Nodes, out: Path, on: Sequence[int], a_node: int, step: int) -> None:
    """Train to a step and save, begin again on fewer nodes, and compare: the steps are the same."""
    for name in ("until", "again"):
        (out / name).mkdir()
        if name == "until":
            nodes.start(out / name, {}, a_node=a_node, until=step)
        else:
            begins_from = str(nodes.shared)
            nodes.start(out / name, {}, on=on, a_node=a_node, begins_from=begins_from)
        assert not any(nodes.wait().values()), said(out / name, 0)
    told = {
        each[0] + before: each[1:-1]
        for before, name in ((0, "until"), (step, "again")) for each in steps_of(out / name, 0)
    }  # fmt: skip
    live = {each[0]: each[1:-1] for each in steps_of(out, on[0] * a_node)}
    assert told.keys() == live.keys()
    for number, (*rows, loss) in live.items():
        assert told[number][:-1] == rows
        assert told[number][-1] == pytest.approx(loss, rel=1e-9)


SEEDS = range(*map(int, os.environ.get("TONARI_LIVE_SEEDS", "0:30").split(":")))
STEPS, ENDS = EPOCHS * SAMPLES // (4 * NODES) - 5, EPOCHS - 1
PLACES = {"batch": STEPS, "forward": STEPS, "gathered": STEPS, "averaged": STEPS, "epoch": EPOCHS,
          "epoch end": ENDS, "evaluation": 25, "saving": ENDS}  # fmt: skip
"""Where a node may be lost, and how often a rank is there with steps to come. All within 50 ms of
it: behind "gathered" is the sum, behind "epoch" the exchange, behind "saving" the writing."""


@pytest.mark.timeout(7200)
def test_a_node_is_lost_at_any_moment_and_the_others_go_on(nodes: Nodes, tmp_path: Path) -> None:
    slow = []
    for seed in SEEDS:
        draw, out = np.random.default_rng(seed), tmp_path / str(seed)
        place = [*PLACES][seed % len(PLACES)]
        node, a_node = int(draw.integers(NODES)), 2 if seed % 6 == 5 else 1
        nth = int(draw.integers(max(PLACES[place] // a_node, 1))) + 1
        fault = ["soon", place, nth, draw.random() / 20]
        out.mkdir()
        nodes.start(out, {node * a_node: fault}, a_node=a_node, saves=True, copies=1 + seed % 2)
        statuses, on = nodes.wait(), [each for each in range(NODES) if each != node]
        assert statuses[node * a_node] == -signal.SIGKILL, f"seed {seed}: {fault} did not happen"
        left = ranks_of(on, a_node)
        report = audit(nodes, out, statuses, left, NODES * a_node)
        report["pause_s"] = round(report.pop("first") - (out / "lost").stat().st_mtime, 2)
        print(json.dumps({"seed": seed, "fault": fault, "node": node, **report}), flush=True)
        slow += [seed] if report["pause_s"] > 10 else []
        if seed % 10 == 5 and report["step"]:
            restarted(nodes, out, on, a_node, report["step"])
    assert len(slow) <= 1, f"seeds {slow} took longer than 10 s"


NOWHERE = "02:00:00:00:00:01"


def part(nodes: Nodes, one: Sequence[str], other: Sequence[str], how: str) -> None:
    """Send what goes from one to the other to an address that nobody has, or mend that."""
    lab = nodes.fs.lab
    to = {name: f"10.77.0.{number + 1}" for number, name in enumerate(lab.nodes)}
    to[parallel_fs.SERVER] = parallel_fs.ADDRESS
    for here, there in [(a, b) for a in one for b in other] + [(b, a) for a in one for b in other]:
        lab.run(here, "ip", "neigh", how, to[there], "lladdr", NOWHERE, "nud", "permanent",
                "dev", "eth0")  # fmt: skip


HALVES = ["node0", "node1", parallel_fs.SERVER], ["node2", "node3"]
BEHIND = "the others have ended without this rank|the others go on without this rank"


@pytest.mark.parametrize(
    ("how", "left"),
    [("cut", [0, 1, 3]), ("stop", [0, 2, 3]), ("two", [0, 3]), ("three", [3]), ("halves", [0, 1])],
)
def test_nodes_that_cannot_be_reached_are_left_behind_and_end(
    nodes: Nodes, tmp_path: Path, how: str, left: list[int]
) -> None:
    # A link is found out long before the time limit, and a node that stands still by it.
    pids = nodes.start(
        tmp_path, {}, saves=True, copies=2, timeout_s=15.0 if how == "stop" else 99.0
    )
    behind = [rank for rank in range(NODES) if rank not in left]
    at_step(tmp_path, 20)
    begun_s = time.time()
    if how == "cut":
        nodes.fs.lab.cut("node2")
    elif how == "halves":
        part(nodes, *HALVES, "replace")
    else:
        for rank in behind:
            os.kill(pids[rank][0], signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    until_s = time.monotonic() + LIMIT_S
    while not (tmp_path / f"end-{left[0]}.json").exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    if how == "cut":
        nodes.fs.lab.mend("node2")
    elif how == "halves":
        part(nodes, *HALVES, "del")
    elif how == "stop":
        os.kill(pids[1][0], signal.SIGCONT)
    statuses = nodes.wait()
    report = audit(nodes, tmp_path, statuses, left)
    pause_s = report.pop("first") - begun_s
    print(json.dumps({"how": how, "pause_s": pause_s, **report}))
    assert pause_s < 60
    if how in ("cut", "stop", "halves"):
        for rank in behind:
            assert statuses[rank] == 1
            assert re.search(BEHIND, said(tmp_path, rank))


def test_halves_that_see_the_directory_and_not_each_other_end(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start(tmp_path, {}, timeout_s=20.0)
    at_step(tmp_path, 20)
    halves = HALVES[0][:2], HALVES[1]
    part(nodes, *halves, "replace")
    assert nodes.wait() == dict.fromkeys(range(NODES), 1)
    part(nodes, *halves, "del")
    for rank in range(NODES):
        assert "have met and cannot connect to one another" in said(tmp_path, rank)


@pytest.mark.parametrize("copies", [1, 2])
def test_rows_of_a_lost_node_are_read_once_or_lie_on_another(
    nodes: Nodes, tmp_path: Path, copies: int
) -> None:
    nodes.start(tmp_path, {2: ["kill", "forward", 6]}, copies=copies)
    nodes.wait()
    ends = [json.loads((tmp_path / f"end-{rank}.json").read_text()) for rank in (0, 1, 3)]
    # Within the first epoch: what it had staged, and no other node.
    assert sum(end[3] for end in ends) == (SAMPLES // NODES if copies == 1 else 0)
    assert (sum(end[2] for end in ends) == 0) == (copies == 2)


def test_torchrun_loses_a_node_and_the_others_train_on(nodes: Nodes, tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.parquet", SAMPLES)
    given = json.dumps({"cache": str(nodes.fs.lab.scratch / "torchrun"), "timeout_s": 60})
    fault = json.dumps({"4": ["kill", "forward", 9]})
    agents = [
        subprocess.Popen(
            [*nodes.fs.lab.enter(f"node{node}"), sys.executable, "-m", "torch.distributed.run",
             f"--nnodes={NODES}", "--nproc-per-node=2", f"--node-rank={node}", "--max-restarts=0",
             "--master-addr=node0", "--master-port=29400", "-m", "tests.dataio.job.live_ranks",
             str(tmp_path), "8", fault, given],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        ) for node in range(NODES)
    ]  # fmt: skip
    until_s, left = time.monotonic() + LIMIT_S, ranks_of([0, 1, 3], 2)
    while not all((tmp_path / f"end-{rank}.json").exists() for rank in left):
        assert time.monotonic() < until_s
        time.sleep(0.1)
    calls = check(tmp_path, 8, left=left, num_samples=SAMPLES)
    assert calls[-1][0] == left
    # The other agents wait for the one that is gone, minutes.
    for agent in agents:
        agent.kill()
        agent.wait(60)
