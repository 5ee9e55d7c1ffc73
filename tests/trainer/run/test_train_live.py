"""A run under live loses ranks, and equals one that was restarted where they were lost."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import tonari.trainer.run.loop as loop
from dataio.base.errors import WorldError
from dataio.base.lines import read_checked_lines
from dataio.job.live import LiveJob
from tests.dataio.job.live_ranks import LIMIT_S
from tests.multirank import ROOT, job_environ
from tests.trainer.digits import write_config
from tonari.certify.claims import exactly_once
from tonari.rows.settings import open_run
from tonari.trainer.checkpoint.directory import whole_checkpoints
from tonari.trainer.checkpoint.export import read_averaged, read_checkpoint
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.live import Live, check_live
from tonari.trainer.run.pace import same_rows

COMMON = (
    "run.live=true", "run.timeout_s=20", "run.epochs=2", "data.batch_size=8", "mesh.dtype=float64",
    "optimizer.kind=adamw", "optimizer.lr=0.01", "optimizer.schedule=steps", "optimizer.ema=0.9",
    "run.checkpoint_steps=5", "run.evaluate_steps=4", "run.keep_checkpoints=9",
)  # fmt: skip
Faults = dict[str, list[Any]]
Mesh = tuple[int, tuple[str, ...], dict[int, list[str]]]
SAME = ("loss", "gradient_norm", "lr", "accuracy", "evaluation_loss", "ema_evaluation_loss")


@dataclass
class Trained:
    """What became of a run.

    Attributes:
        out: Where all is.
        statuses: Of its ranks.
        sizes: Ranks at first, and after each loss.
        steps: At which these were.
    """

    out: Path
    statuses: list[int]
    sizes: list[int]
    steps: list[int]

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.out.glob("said-*")))

    def check(self, *, lost_after: int) -> None:
        """Check that all was as in the run that was restarted, and each sample came once."""
        run, again = self.out / "run", self.out / "again" / "run"
        assert exactly_once(open_run(run, (), log=None))["holds"]
        mine, theirs = (
            {(line["kind"], line["step"]): line for line in read_checked_lines(path)}
            for path in (run / "metrics.jsonl", again / "metrics.jsonl")
        )
        assert len([*read_checked_lines(run / "metrics.jsonl")]) == len(mine)
        # Of a step behind which ranks were lost the line may be missing; a restart evaluates there.
        missing = theirs.keys() - mine.keys()
        assert missing <= {("step", lost_after), ("evaluation", lost_after)}
        assert mine.keys() <= theirs.keys()
        for key, line in mine.items():
            for name in SAME:
                # The line of an epoch counts from the loss on.
                if line.get(name) is not None and (name, key[0]) != ("loss", "epoch"):
                    assert line[name] == pytest.approx(theirs[key][name], rel=1e-9, abs=1e-12), key
        last, other = (whole_checkpoints(path / "checkpoints")[-1] for path in (run, again))
        assert last.name == other.name
        for read in (lambda path: read_checkpoint(path)["model"], read_averaged):
            torch.testing.assert_close(read(last), read(other), rtol=1e-9, atol=1e-12)


def train(
    out: Path, num_ranks: int, faults: Faults, *overrides: str,
    by_size: dict[int, list[str]],
) -> Trained:  # fmt: skip
    """Train under live, and again by restarts."""
    config = write_config(out, num_samples=96)
    given = [*COMMON, f"run.directory={out / 'run'}", f"data.cache={out / 'cache'}", *overrides]
    options = {"config": str(config), "overrides": given, "by_size": by_size}
    subprocess.run(
        [sys.executable, "-m", "tests.ranks.trainer.live", str(out), str(num_ranks),
         json.dumps(faults), json.dumps(options)],
        check=True, timeout=3 * LIMIT_S, env=job_environ(), cwd=ROOT,
    )  # fmt: skip
    sizes, steps = json.loads((out / "stages.json").read_text())
    return Trained(out, json.loads((out / "ended.json").read_text()), sizes, steps)


VIT = (
    "data.label=cls", "model.kind=vit", "model.patch=4", "model.width=8", "model.depth=4",
    "model.heads=2", "optimizer.clip=0.5",
)  # fmt: skip
DP: Mesh = (3, (), {2: ["data.batch_size=6", "optimizer.accumulate=2"]})
HSDP: Mesh = (4, ("mesh.dp_shard=2", "optimizer.clip=0.5"), {2: ["optimizer.accumulate=2"]})
PP: Mesh = (4, (*VIT, "mesh.pp=2"), {2: ["optimizer.accumulate=2"]})
TP: Mesh = (4, (*VIT, "mesh.tp=2"), {2: ["optimizer.accumulate=2"]})
LARGE: Mesh = (3, (*VIT, "model.width=64"), DP[2])
MESHES = {"dp": DP, "hsdp": HSDP, "pp": PP, "tp": TP, "large dp": LARGE}
"""Ranks, what else is set, and what a restart on so many ranks sets for as many rows a step."""


def check(out: Path, mesh: str, faults: Faults, *overrides: str, left: int, steps: int) -> None:
    """Check a run whose ranks are lost once, or all go on, behind that step or the one before."""
    num_ranks, settings, by_size = MESHES[mesh]
    trained = train(out, num_ranks, faults, *settings, *overrides, by_size=by_size)
    assert trained.statuses.count(0) == num_ranks - ("kill" in str(faults)), trained.said()
    lost = left < num_ranks
    assert trained.sizes == [num_ranks, left][: 1 + lost]
    assert trained.steps in ([steps][:lost], [steps - 1][:lost])
    trained.check(lost_after=trained.steps[0] if lost else steps)


@pytest.mark.multirank
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("mesh", "faults", "left", "steps"),
    [
        ("dp", {"0": ["kill", "forward", 5]}, 2, 4),
        ("hsdp", {"2": ["kill", "norm", 4]}, 2, 3),
        # Who lacks what was summed has what others have: nobody is lost.
        ("dp", {"1": ["lack", "forward", 3]}, 3, 3),
        ("hsdp", {"1": ["lack", "norm", 3]}, 4, 3),
        # Ranks of both replicas make up one.
        ("pp", {"1": ["kill", "forward", 3]}, 2, 2),
        ("tp", {"1": ["kill", "forward", 3]}, 2, 2),
        # By torch's fully_shard, which large replicas are kept by.
        pytest.param("large dp", {"1": ["lack", "forward", 3]}, 3, 3, marks=pytest.mark.nightly),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "-",
)
def test_replicas_that_are_left_train_on_as_a_run_restarted_there_would(
    tmp_path, mesh, faults, left, steps
):
    check(tmp_path, mesh, faults, left=left, steps=steps)


@pytest.mark.multirank
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("place", "time", "steps"),
    [
        ("forward", 1, 0), ("step", 2, 2), ("count", 4, 4), ("follow", 4, 4), ("evaluate", 1, 4),
        ("save", 1, 4), ("epoch end", 1, 4), ("evaluate", 2, 4), ("forward", 5, 4),
    ],
)  # fmt: skip
def test_a_rank_may_be_lost_at_any_moment(tmp_path, mesh, place, time, steps):
    check(tmp_path, mesh, {"1": ["kill", place, time]}, left=2, steps=steps)


@pytest.mark.multirank
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["local", "global", "global shuffle.moves=true"])
def test_any_shuffle_goes_on(tmp_path, kind):
    given = f"shuffle.kind={kind}".split()
    check(tmp_path, "dp", {"1": ["kill", "forward", 3]}, *given, left=2, steps=2)


@pytest.mark.multirank
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("place", ["complete", "forward"])
def test_checkpoints_may_be_written_beside_training(tmp_path, place):
    time = 1 if place == "complete" else 6
    given = ("run.checkpoint_async=true", "run.checkpoint_steps=2")
    num_ranks, settings, by_size = MESHES["dp"]
    faults = {"1": ["kill", place, time]}
    trained = train(tmp_path, num_ranks, faults, *settings, *given, by_size=by_size)
    assert trained.statuses == [0, -9, 0], trained.said()
    trained.check(lost_after=trained.steps[0])


def config_of(tmp_path: Path, *overrides: str) -> Config:
    return load_config(write_config(tmp_path), (*COMMON, *overrides))


def test_ranks_that_are_left_make_up_whole_replicas_each_where_it_was(tmp_path):
    live = Live(config_of(tmp_path), (2, 3, 1, 1, 2))  # pp, dp_replicate, dp_shard, cp, tp
    ranks = np.arange(12).reshape(2, 3, 2)
    assert live.choose(tuple(range(12))) == tuple(range(12))
    # A rank of the first replica and one of the second: one is made of what is left of both.
    left = np.delete(np.arange(12), [ranks[0, 0, 1], ranks[1, 1, 0]])
    assert live.choose(tuple(left.tolist())) == (0, 3, 2, 5, 6, 7, 10, 9)
    with pytest.raises(
        WorldError, match=r"ranks \[6, 7\] are left, and do not make up one replica"
    ):
        live.choose((6, 7))


def test_lines_of_a_step_are_kept_only_while_a_rank_that_has_it_is_there(tmp_path):
    live = Live(config_of(tmp_path, "mesh.dp_replicate=2"), (1, 2, 1, 1, 1))
    live._steps = 7

    def job(other: list[float]) -> LiveJob:
        def allgather(mine: bytes, *, doing: str) -> list[bytes]:
            return [mine, json.dumps(other).encode()]

        given = SimpleNamespace(number=7, world=SimpleNamespace(world_size=2, allgather=allgather))
        return cast(LiveJob, given)

    live.begin(job([8, 0.0, 8]))
    assert live.progress.steps == 8
    # It dies before this rank has what it had.
    live.begin(job([7, 0.0, 7]))
    assert live.progress.steps == 7


@pytest.mark.parametrize(
    ("before", "now", "rows", "accumulate"),
    [(3, 2, 6, 2), (4, 2, 8, 2), (4, 3, 5, 2), (3, 3, 8, 1)],
)
def test_a_step_keeps_its_rows_where_they_divide(tmp_path, before, now, rows, accumulate):
    config = same_rows(config_of(tmp_path, f"mesh.dp_replicate={before}"), before=before, now=now)
    assert (config.data.batch_size, config.optimizer.accumulate) == (rows, accumulate)


@pytest.mark.parametrize(
    ("sizes", "settings", "words"),
    [
        ((1, 2, 1, 1, 1), ["run.device=cuda"], 'run.device is "cuda"'),
        ((1, 2, 1, 1, 1), ["importance.kind=kakurenbo"], "what is known of a lost rank's rows"),
        ((1, 1, 4, 1, 1), [], "all 4 ranks are one replica"),
        ((2, 2, 1, 1, 1), [], r"mesh.pp = 2 and optimizer.clip = 0"),
        ((1, 2, 1, 2, 1), [], r"mesh.cp = 2"),
    ],
)
def test_what_cannot_go_on_is_refused_before_anything_is_staged(tmp_path, sizes, settings, words):
    with pytest.raises(ConfigError, match=f"run.live is true.*{words}.*leave run.live out"):
        check_live(config_of(tmp_path, *settings), sizes)


def test_an_optimizer_that_sends_within_a_step_is_refused(tmp_path):
    live = Live(config_of(tmp_path), (1, 2, 2, 1, 1))
    live.on_all = True
    weights = [torch.nn.Parameter(torch.ones(2, 2))]
    live.check_optimizer(torch.optim.AdamW(weights))
    with pytest.raises(ConfigError, match="the optimizer is Adafactor, which looks at"):
        live.check_optimizer(torch.optim.Adafactor(weights))


@pytest.mark.usefixtures("unstaged")
def test_ranks_that_torchrun_did_not_start_are_refused(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WorldError, match="expected what torchrun sets: MPI ends all ranks"):
        loop.train(config_of(tmp_path))


def test_ranks_cannot_join_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TONARI_LIVE_JOIN", "1")
    with pytest.raises(ConfigError, match="on the mesh of a run they have no place"):
        loop.train(config_of(tmp_path))
