"""Whole runs on several meshes: rows, losses and reads of one process, and on from any other."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.multirank import RunRanks
from tests.trainer.digits import write_config
from tests.trainer.watch.watched import Step, merged, train_watched

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(900)]

GLOBAL_BATCH = 16
BOTH = (
    "mesh.dtype=float64", "optimizer.kind=adamw", "optimizer.lr=0.01", "optimizer.clip=1.0",
    "importance.kind=kakurenbo", "importance.fraction=0.4", "importance.tau=0",
    "run.checkpoint_epochs=0",
)  # fmt: skip
VIT = (
    *BOTH, "data.label=cls", "model.kind=vit", "model.patch=4", "model.width=8", "model.depth=4",
    "model.heads=2",
)  # fmt: skip
MODELS = {
    "vit": (*VIT, "run.epochs=3"),
    "long vit": (*VIT, "run.epochs=5"),
    "gpt": (*BOTH, "run.epochs=3", "optimizer.lr=0.06"),
}
NUM_IMAGES = {"vit": 72, "long vit": 208}
TEXT = """
[data]
kind = "text"
train = "{text}"
test_fraction = 0.2
sequence_length = 8
workers.threads = 0
[model]
kind = "gpt"
width = 8
depth = 2
heads = 2
[shuffle]
exchange = 0.3
[run]
log_steps = 1
device = "cpu"
"""
MESHES = {
    "1": (1, ()),
    "dp2": (2, ("mesh.dp_shard=2",)),
    "tp2": (1, ("mesh.tp=2", "mesh.sequence_parallel=true", "mesh.loss_parallel=true")),
    "pp2": (1, ("mesh.pp=2", "mesh.microbatches=4")),
    "cp2": (1, ("mesh.cp=2",)),
    "dp2 tp2": (2, ("mesh.tp=2",)),
    "dp2 pp2": (2, ("mesh.pp=2",)),
    "tp2 pp2": (1, ("mesh.pp=2", "mesh.tp=2", "mesh.schedule=zbv", "mesh.microbatches=4")),
    "hsdp": (4, ("mesh.dp_replicate=2", "mesh.dp_shard=2")),
    "dp4": (4, ()),
    "pp4": (1, ("mesh.pp=4",)),
    "pp2 dp2 tp2": (2, ("mesh.pp=2", "mesh.dp_shard=2", "mesh.tp=2")),
}
"""Replicas, and what else to set."""

CUTS = (17, 8, 9)
"""Steps of the first links of a chain: each ends in the middle of the epoch after its first."""


@dataclass
class Runs:
    """Starts runs, each in a directory of its name, and compares them with one process.

    Attributes:
        root: Holds everything.
        start: Starts ranks.
    """

    root: Path
    start: RunRanks

    def __post_init__(self) -> None:
        (self.root / "gpt").mkdir()
        (self.root / "gpt/text").write_text(90 * "the cat. ")
        (self.root / "gpt/run.toml").write_text(TEXT.format(text=self.root / "gpt/text"))
        for model, num_samples in NUM_IMAGES.items():
            (self.root / model).mkdir()
            write_config(self.root / model, num_samples=num_samples)

    def settings(self, model: str, mesh: str, name: str, *more: str) -> list[str]:
        """Set a mesh, and a run directory with a cache of its own."""
        replicas, given = MESHES[mesh]
        directory = self.root / model / name
        return [
            *MODELS[model], *given, f"data.batch_size={GLOBAL_BATCH // replicas}",
            f"run.directory={directory}", f"data.cache={directory}/cache {mesh}", *more,
        ]  # fmt: skip

    def on_one(self, model: str, name: str, *more: str) -> dict[str, Any]:
        """Train in this process."""
        config = self.root / model / "run.toml"
        return train_watched(config, *self.settings(model, "1", name, *more))

    def on(
        self, num_ranks: int, *cases: tuple[str, ...], nodes: bool = False
    ) -> list[list[dict[str, Any]]]:
        """Train (model, mesh, name, more ...) one after the other; each case's ranks' reports.

        With ``nodes``, each rank is a node of its own.
        """
        joined = ["|".join([f"{self.root}/{c[0]}/run.toml", *self.settings(*c)]) for c in cases]
        env = {"TONARI_RANKS_PER_NODE": "1"} if nodes else None
        started = self.start("trainer/meshes", num_ranks, *joined, env=env, timeout_s=800)
        reports: Any = started.reports
        return [list(ranks) for ranks in zip(*reports, strict=True)]

    @cached_property
    def whole(self) -> dict[str, dict[str, Any]]:
        """What one process saw of each model, in a run that is as it should be."""
        whole = {model: self.on_one(model, "1") for model in MODELS}
        for seen in whole.values():
            check_each_sample_once_an_epoch(seen["steps"])
            assert any(kind == "refresh" for _, kind, _ in seen["steps"])
            # All samples were staged, and no row was read for a batch but those that were given.
            assert seen["source_rows"] == len(samples(seen["steps"], 0))
            assert seen["rows"] == sum(len(ids) for *_, ids in seen["steps"])
        assert whole["long vit"]["num_steps"] >= 50
        return whole

    def losses(self, model: str, name: str) -> list[float]:
        """Read a run's losses, step by step, and what it hid and scored at the ends of epochs."""
        text = (self.root / model / name / "metrics.jsonl").read_text()
        told: list[float] = []
        for line in map(json.loads, text.splitlines()):
            names = ("loss",) if line["kind"] == "step" else ("hidden_fraction", "evaluation_loss")
            told += [line[name] for name in names]
        return told

    def check(self, model: str, name: str, reports: list[dict[str, Any]]) -> None:
        """Check that a run that was not cut did and read what the one process did."""
        whole = self.whole[model]
        assert merged(reports) == whole["steps"], name
        self.check_losses(model, name)
        for figure in ("source_rows", "rows", "cache_bytes"):
            # Once by the reader of each replica, by nobody else.
            assert sum(report.get(figure, 0) for report in reports) == whole[figure], name
        readers = [report for report in reports if "rows" in report]
        assert len(readers) == 1 + max(report["replica"] for report in reports)

    def check_losses(self, model: str, name: str) -> None:
        """Check that a run's losses, hidden shares and evaluations are those of one process."""
        expected = pytest.approx(self.losses(model, "1"), rel=1e-9)
        assert self.losses(model, name) == expected, name

    def check_chain(self, name: str, links: list[list[dict[str, Any]]]) -> None:
        """Check that runs, each going on from the one before, are together the uninterrupted."""
        whole = self.whole["long vit"]["steps"]
        steps: list[Step] = []
        for link in links:
            steps += merged(link)
            finished = link is links[-1]
            assert all(rank["finished"] == finished for rank in link)
            # Cut in the middle of an epoch.
            assert finished or whole[len(steps)][:2] == steps[-1][:2]
        assert steps == whole
        check_each_sample_once_an_epoch(steps)
        self.check_losses("long vit", name)


def samples(steps: list[Step], epoch: int) -> list[int]:
    """All samples of an epoch's batches, ascending: hidden ones are given to be scored anew."""
    return sorted(i for its, _, ids in steps for i in ids if its == epoch)


def check_each_sample_once_an_epoch(steps: list[Step]) -> None:
    """Check that each sample is trained or hidden, and that once, in each epoch."""
    num_samples = 1 + max(i for *_, ids in steps for i in ids)
    for epoch in range(1 + steps[-1][0]):
        assert samples(steps, epoch) == list(range(num_samples)), epoch


@pytest.fixture
def runs(run_ranks: RunRanks, tmp_path: Path) -> Runs:
    """A directory of runs."""
    return Runs(tmp_path, run_ranks)


def test_every_mesh_trains_the_rows_of_one_process_and_goes_on_where_another_stopped(
    runs: Runs,
) -> None:
    on_two = [("vit", "dp2"), ("vit", "tp2"), ("vit", "pp2"), ("gpt", "cp2")]
    on_four = [("vit", "dp2 tp2"), ("vit", "dp2 pp2"), ("vit", "tp2 pp2"), ("vit", "pp4"),
               ("gpt", "hsdp")]  # fmt: skip
    seen = runs.on(2, *((model, mesh, mesh) for model, mesh in on_two))
    seen += runs.on(
        4, *((model, mesh, mesh) for model, mesh in on_four),
        ("long vit", "dp2 pp2", "chain", f"stop={CUTS[0]}"),
    )  # fmt: skip
    for (model, mesh), reports in zip(on_two + on_four, seen, strict=False):
        runs.check(model, mesh, reports)
    for middle in seen[-3][1:3]:
        assert (middle["columns"], middle["held_bytes"]) == ([[]], 0)
    links = [seen[-1], [runs.on_one("long vit", "chain", f"stop={CUTS[1]}")]]
    links += runs.on(
        4, ("long vit", "dp4", "chain", f"stop={CUTS[2]}"), ("long vit", "tp2 pp2", "chain")
    )
    runs.check_chain("chain", links)


def test_a_last_stage_that_reads_its_labels_trains_as_one_process_and_goes_on_either_way(
    runs: Runs,
) -> None:
    read = "mesh.targets=read"
    whole, *links = runs.on(
        2,
        ("vit", "pp2", "read", read),
        ("long vit", "pp2", "chain", f"stop={CUTS[0]}"),
        ("long vit", "pp2", "chain", read, f"stop={CUTS[1]}"),
        ("long vit", "pp2", "chain"),
        nodes=True,
    )
    runs.check_chain("chain", links)
    assert merged(whole) == runs.whole["vit"]["steps"]
    runs.check_losses("vit", "read")
    # Images and labels of the training data, and of the test data.
    assert len(list((runs.root / "vit/read").glob("cache pp2/*/node0/meta.json"))) == 4


@pytest.mark.slow
def test_pipelines_go_on_as_one_process_and_as_replicas(runs: Runs) -> None:
    first = runs.on(4, ("long vit", "tp2 pp2", "chain", f"stop={CUTS[0]}"))
    one = runs.on_one("long vit", "chain", f"stop={CUTS[1]}")
    last = runs.on(
        4, ("long vit", "pp4", "chain", f"stop={CUTS[2]}"), ("long vit", "dp2 tp2", "chain")
    )
    runs.check_chain("chain", [*first, [one], *last])


@pytest.mark.slow
def test_eight_ranks_train_the_rows_of_one_process_and_go_on_where_it_stopped(runs: Runs) -> None:
    one = runs.on_one("long vit", "chain", f"stop={CUTS[0]}")
    whole, rest = runs.on(
        8, ("vit", "pp2 dp2 tp2", "pp2 dp2 tp2"), ("long vit", "pp2 dp2 tp2", "chain")
    )
    runs.check("vit", "pp2 dp2 tp2", whole)
    runs.check_chain("chain", [[one], rest])
