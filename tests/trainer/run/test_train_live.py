"""A run under live loses ranks, and equals one that was restarted where they were lost."""

import json
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import dataio
import tonari.trainer.run.loop as loop
from dataio.base.errors import WorldError
from dataio.base.lines import read_checked_lines
from dataio.job.live import LiveJob
from tests.dataio.job.live_ranks import LIMIT_S
from tests.multirank import ROOT, job_environ, python_command
from tests.trainer.digits import write_config
from tonari.certify.claims import exactly_once
from tonari.rows.settings import open_run
from tonari.trainer.checkpoint.directory import read_progress, whole_checkpoints
from tonari.trainer.checkpoint.export import read_averaged, read_checkpoint
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.beside.records import waiting
from tonari.trainer.run.live import Live, check_live
from tonari.trainer.run.pace import same_rows

COMMON = (
    "run.live=true", "run.timeout_s=200", "run.epochs=2", "data.batch_size=8", "mesh.dtype=float64",
    "optimizer.kind=adamw", "optimizer.lr=0.01", "optimizer.schedule=steps", "optimizer.ema=0.9",
    "run.checkpoint_steps=5", "run.evaluate_steps=4", "run.keep_checkpoints=9",
)  # fmt: skip
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
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
    by_size: dict[int, list[str]], units: list[int],
) -> Trained:  # fmt: skip
    """Train under live, and again by restarts."""
    config = write_config(out, num_samples=96)
    given = [*COMMON, f"run.directory={out / 'run'}", f"data.cache={out / 'cache'}", *overrides]
    options = {"config": str(config), "overrides": given, "by_size": by_size, "units": units}
    subprocess.run(
        [*python_command(), "-m", "tests.ranks.trainer.live", str(out), str(num_ranks),
         json.dumps(faults), json.dumps(options)],
        check=True, timeout=3 * LIMIT_S, env=job_environ(), cwd=ROOT,
    )  # fmt: skip
    sizes, steps = json.loads((out / "stages.json").read_text())
    return Trained(out, json.loads((out / "ended.json").read_text()), sizes, steps)


VIT = (
    "data.label=cls", "model.kind=vit", "model.patch=4", "model.width=8", "model.depth=4",
    "model.heads=2", "optimizer.clip=0.5",
)  # fmt: skip
DP: Mesh = (
    3, (),
    {1: ["optimizer.accumulate=3"], 2: ["data.batch_size=6", "optimizer.accumulate=2"],
     4: ["data.batch_size=6"]},
)  # fmt: skip
PAIRS = {2: ["optimizer.accumulate=2"], 6: ["data.batch_size=5"]}
HSDP: Mesh = (4, ("mesh.dp_shard=2", "optimizer.clip=0.5"), PAIRS)
PP: Mesh = (4, (*VIT, "mesh.pp=2"), {**PAIRS, 6: ["data.batch_size=4"]})
FSDP: Mesh = (
    3, ("mesh.dp_shard=3", "optimizer.clip=0.5"),
    {number: [*given, f"mesh.dp_shard={number}"] for number, given in DP[2].items()},
)  # fmt: skip
PAIR: Mesh = (
    2, ("mesh.dp_shard=2", "optimizer.clip=0.5"), {1: ["mesh.dp_shard=1", "optimizer.accumulate=2"]}
)  # fmt: skip
TP: Mesh = (4, (*VIT, "mesh.tp=2"), PAIRS)
LARGE: Mesh = (3, (*VIT, "model.width=64"), DP[2])
MESHES = {"dp": DP, "hsdp": HSDP, "fsdp": FSDP, "pair": PAIR, "pp": PP, "tp": TP, "large dp": LARGE}
"""Ranks, what else is set, and what a restart on so many ranks sets for as many rows a step."""


def check(
    out: Path, mesh: str, faults: Faults, *overrides: str, left: int, steps: int,
    as_restart: bool = True,
) -> None:  # fmt: skip
    """Check a run whose ranks are lost once, or all go on, behind that step or the one before."""
    num_ranks, settings, by_size = MESHES[mesh]
    came = max(left - num_ranks, 0)
    trained = train(
        out, num_ranks, faults, *settings, *overrides, by_size=by_size, units=[came][:came]
    )
    assert trained.statuses.count(0) == num_ranks + came - ("kill" in str(faults)), trained.said()
    others = left != num_ranks
    assert trained.sizes == [num_ranks, left][: 1 + others]
    if others and "kill" not in str(faults):  # ranks come, or leave as all notice it
        assert trained.steps[0] >= steps
    else:
        assert trained.steps in ([steps][:others], [steps - 1][:others])
    if as_restart:
        trained.check(lost_after=trained.steps[0] if others else steps)


@pytest.mark.multirank
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("mesh", "faults", "left", "steps"),
    [
        ("dp", {"0": ["kill", "forward", 5]}, 2, 4),
        pytest.param("hsdp", {"2": ["kill", "norm", 4]}, 2, 3, marks=pytest.mark.nightly),
        pytest.param("fsdp", {"1": ["kill", "forward", 5]}, 2, 4, marks=pytest.mark.nightly),
        # Who lacks what was summed has what others have: nobody is lost.
        pytest.param("dp", {"1": ["lack", "forward", 3]}, 3, 3, marks=pytest.mark.nightly),
        ("hsdp", {"1": ["lack", "norm", 3]}, 4, 3),
        # Ranks of both replicas make up one.
        ("pp", {"1": ["kill", "forward", 3]}, 2, 2),
        pytest.param("tp", {"1": ["kill", "forward", 3]}, 2, 2, marks=pytest.mark.nightly),
        # Others wait for it at a store, much longer than the test.
        ("hsdp", {"1": ["kill", "mesh", 1]}, 2, 0),
        # Asked by SIGTERM, it leaves with its step: no rank waits for it.
        ("dp", {"1": ["ask", "forward", 5]}, 2, 5),
        # So does one that is asked while all meet.
        pytest.param(
            "dp",
            {"0": ["ask", "meet", 1], "1": ["kill", "forward", 3]},
            1,
            2,
            marks=pytest.mark.nightly,
        ),
        # A copy on another node has taken each step that counts, and no other.
        ("fsdp", {"1": ["kill", "share", 4]}, 2, 3),
        pytest.param("fsdp", {"2": ["lack", "norm", 3]}, 3, 3, marks=pytest.mark.nightly),
        pytest.param("fsdp", {"2": ["ask", "forward", 3]}, 2, 3, marks=pytest.mark.nightly),
        ("fsdp", {"0": ["call", "forward", 5]}, 4, 4),
        pytest.param("fsdp", {"2": ["kill", "norm", 3]}, 2, 2, marks=pytest.mark.nightly),
        pytest.param("pair", {"1": ["kill", "forward", 5]}, 1, 4, marks=pytest.mark.nightly),
        # A replica comes, of which each rank takes its part.
        pytest.param("hsdp", {"0": ["call", "forward", 5]}, 6, 4, marks=pytest.mark.nightly),
        pytest.param("dp", {"0": ["call", "count", 5]}, 4, 5, marks=pytest.mark.nightly),
        pytest.param("pp", {"0": ["call", "forward", 5]}, 6, 4, marks=pytest.mark.nightly),
        pytest.param("tp", {"0": ["call", "norm", 5]}, 6, 4, marks=pytest.mark.nightly),
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
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "place",
    ["deal", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("keep", "share"))],
)
def test_one_replica_loses_another_rank_before_a_step_on_those_that_were_left(tmp_path, place):
    # Rank 3 has the copy of no piece that is lost, and comes there for the first time since.
    time = {"keep": 2, "deal": 2, "share": 3}[place]
    faults = {"1": ["kill", "forward", 3], "3": ["kill", place, time]}
    given = ("mesh.dp_shard=4", "optimizer.clip=0.5", "data.batch_size=6")
    by_size = {2: ["mesh.dp_shard=2", "optimizer.accumulate=2"],
               3: ["mesh.dp_shard=3", "optimizer.accumulate=2", "data.batch_size=4"]}  # fmt: skip
    trained = train(tmp_path, 4, faults, *given, by_size=by_size, units=[])
    assert (trained.statuses, trained.steps) == ([0, -9, 0, -9], [2, 2]), trained.said()
    trained.check(lost_after=2)


@pytest.mark.multirank
@pytest.mark.timeout(400)
def test_one_replica_ends_if_a_piece_and_its_copy_are_lost(tmp_path):
    num_ranks, settings, by_size = FSDP
    faults = {rank: ["kill", "forward", 3] for rank in ("1", "2")}
    trained = train(tmp_path, num_ranks, faults, *settings, by_size=by_size, units=[])
    assert trained.statuses == [1, -9, -9]
    assert "ranks [0] are left, and a piece of the weights is on none of them" in trained.said()


@pytest.mark.multirank
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mesh", [each for each in MESHES if each != "pair"])
@pytest.mark.parametrize(
    ("place", "time", "steps"),
    [
        ("forward", 1, 0), ("step", 2, 2), ("count", 4, 4), ("follow", 4, 4), ("evaluate", 1, 4),
        ("save", 1, 4), ("epoch end", 1, 4), ("evaluate", 2, 4), ("forward", 5, 4),
    ],
)  # fmt: skip
def test_a_rank_may_be_lost_at_any_moment(tmp_path, mesh, place, time, steps):
    if MESHES[mesh] in (PP, TP):  # two replicas read: an epoch has 6 steps, not 4
        steps = {"save": 5, "epoch end": 6}.get(place, steps)
    check(tmp_path, mesh, {"1": ["kill", place, time]}, left=2, steps=steps)


@pytest.mark.multirank
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["local", "global", "global shuffle.moves=true"])
def test_any_shuffle_goes_on(tmp_path, kind):
    given = f"shuffle.kind={kind}".split()
    check(tmp_path, "dp", {"1": ["kill", "forward", 3]}, *given, left=2, steps=2)


POLICIES = {
    "kakurenbo": ("fraction=0.4", "tau=0.05", "warmup_epochs=0"), "infobatch": ("delta=1.0",),
    "random": ("delta=1.0",),
}  # fmt: skip


@pytest.mark.multirank
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "mesh", "faults", "left", "steps", "as_restart"),
    [
        ("infobatch", "dp", {"1": ["kill", "forward", 6]}, 2, 5, True),
        # Rows that it hid fill the last steps: of a lost node's, others than after a restart.
        ("kakurenbo", "dp", {"1": ["kill", "epoch end", 1]}, 2, 4, False),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in [
            ("infobatch", "dp", {"0": ["call", "forward", 6]}, 4, 5, True),
            ("infobatch", "hsdp", {"1": ["kill", "forward", 6]}, 2, 5, True),
            ("random", "dp", {"1": ["kill", "forward", 3]}, 2, 2, True),
            ("infobatch", "hsdp", {"1": ["lack", "norm", 8]}, 4, 8, True),
            ("kakurenbo", "dp", {"1": ["lack", "forward", 6]}, 3, 6, True),
            ("kakurenbo", "pp", {"1": ["kill", "forward", 8]}, 2, 7, False),
        ]),
    ],
)  # fmt: skip
def test_any_policy_goes_on_and_as_a_restart_where_no_score_that_it_goes_by_is_lost(
    tmp_path, kind, mesh, faults, left, steps, as_restart
):
    given = [f"importance.{each}" for each in (f"kind={kind}", *POLICIES[kind])]
    check(tmp_path, mesh, faults, *given, left=left, steps=steps, as_restart=as_restart)
    found = exactly_once(open_run(tmp_path / "run", (), log=None))
    assert found["holds"]
    assert [epoch["finished"] for epoch in found["epochs"]] == [True] * 2
    assert found["epochs"][1]["hidden"] > 0


@pytest.mark.multirank
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("place", ["complete", "forward"])
def test_checkpoints_may_be_written_beside_training(tmp_path, place):
    time = 1 if place == "complete" else 6
    given = ("run.checkpoint_async=true", "run.checkpoint_steps=2")
    num_ranks, settings, by_size = MESHES["dp"]
    faults = {"1": ["kill", place, time]}
    trained = train(tmp_path, num_ranks, faults, *settings, *given, by_size=by_size, units=[])
    assert trained.statuses == [0, -9, 0], trained.said()
    trained.check(lost_after=trained.steps[0])


@pytest.mark.multirank
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lost", ["0", pytest.param("1", marks=pytest.mark.nightly)])
def test_evaluations_beside_a_run_go_on(tmp_path, lost):
    check(tmp_path, "dp", {lost: ["kill", "forward", 6]}, "run.evaluation=beside", left=2, steps=5)
    lines = read_checked_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [4, 8]
    assert not waiting(tmp_path / "run")


@pytest.mark.multirank
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_sigterm_of_all_ranks_ends_the_run_with_a_checkpoint(tmp_path):
    num_ranks, settings, by_size = MESHES["dp"]
    faults = {str(rank): ["ask", "forward", 1] for rank in range(num_ranks)}
    given = (*settings, "run.checkpoint_steps=100")
    trained = train(tmp_path, num_ranks, faults, *given, by_size=by_size, units=[])
    assert (trained.statuses, trained.steps) == ([0] * num_ranks, []), trained.said()
    (saved,) = whole_checkpoints(tmp_path / "run" / "checkpoints")
    assert 1 <= read_progress(saved).steps < 8


@pytest.mark.multirank
@pytest.mark.timeout(400)
def test_sigterm_of_all_ranks_while_they_meet_ends_the_run_with_a_checkpoint(tmp_path):
    num_ranks, settings, by_size = MESHES["dp"]
    faults = {"0": ["ask", "meet", 1], "1": ["kill", "forward", 3], "2": ["ask", "meet", 1]}
    given = (*settings, "run.checkpoint_steps=100")
    trained = train(tmp_path, num_ranks, faults, *given, by_size=by_size, units=[])
    assert trained.statuses == [0, -9, 0], trained.said()
    (saved,) = whole_checkpoints(tmp_path / "run" / "checkpoints")
    assert read_progress(saved).steps == trained.steps[0] == 2


@pytest.mark.parametrize("saved", [False, True])
def test_ranks_that_cannot_save_say_from_where_a_restart_goes_on(
    tmp_path, monkeypatch, caplog, saved
):
    def fail(*_: object, asked: Callable[[], bool], **__: object) -> None:
        assert not asked()
        signal.raise_signal(signal.SIGTERM)
        assert asked()
        raise WorldError("they cannot connect")

    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dataio, "live", fail)
    newest = tmp_path / "run" / "checkpoints" / "step-00000007"
    if saved:
        newest.mkdir(parents=True)
    config = config_of(tmp_path, "mesh.dp_replicate=2", f"run.directory={tmp_path / 'run'}")
    with pytest.raises(WorldError, match="they cannot connect"):
        loop.train(config)
    words = f"by SIGTERM, and cannot save; the same command goes on from {newest}"
    assert (words in caplog.text) == saved
    assert ("goes on from the run's beginning" in caplog.text) != saved


def config_of(tmp_path: Path, *overrides: str) -> Config:
    return load_config(write_config(tmp_path), (*COMMON, *overrides))


def test_ranks_that_are_left_make_up_whole_replicas_each_where_it_was(tmp_path):
    live = Live(config_of(tmp_path), (2, 3, 1, 1, 2))  # pp, dp_replicate, dp_shard, cp, tp
    ranks = np.arange(12).reshape(2, 3, 2)
    assert live.choose(tuple(range(12)), 12) == tuple(range(12))
    # A rank of the first replica and one of the second: one is made of what is left of both.
    left = np.delete(np.arange(12), [ranks[0, 0, 1], ranks[1, 1, 0]])
    assert live.choose(tuple(left.tolist()), 12) == (0, 3, 2, 5, 6, 7, 10, 9)
    # Newcomers are a replica, whatever their first number, and are the last one.
    assert live.choose((0, 3, 7, 8, 13, 14, 15, 16), 12) == (0, 3, 16, 13, 8, 7, 14, 15)
    with pytest.raises(
        WorldError, match=r"ranks \[6, 7\] are left, and do not make up one replica"
    ):
        live.choose((6, 7), 12)


def joined_job(*ranks: int, num_began: int) -> LiveJob:
    world = SimpleNamespace(rank=0, world_size=len(ranks), allgather=lambda mine, *, doing: [mine])
    return cast(
        LiveJob, SimpleNamespace(number=0, world=world, ranks=ranks, num_began=num_began)
    )  # fmt: skip


def test_settings_are_those_of_the_ranks_that_are_there_and_noted_as_they_were_given(tmp_path):
    given = config_of(
        tmp_path, *VIT, "mesh.pp=2", "mesh.targets=read", "mesh.dp_replicate=2",
        "optimizer.accumulate=3",
    )  # fmt: skip
    live = Live(given, (2, 2, 1, 1, 1))
    assert live.begin(joined_job(0, 1, 2, 3, num_began=4)) == given
    for ranks, accumulate in (((0, 3), 6), ((0, 5, 2, 4), 3)):
        config = live.begin(joined_job(*ranks, num_began=4))
        # Stages of a replica that is made of others may lie on any nodes.
        assert (config.optimizer.accumulate, config.mesh.targets) == (accumulate, "send")
        assert live.as_given(config) == given


@pytest.mark.parametrize(
    ("asked", "goes_on", "leaves"),
    [("1100", True, 1), ("0110", True, 0), ("1010", False, 0), ("1111", False, 0)],
)
def test_ranks_leave_if_the_others_make_up_a_replica(tmp_path, asked, goes_on, leaves):
    live, left = Live(config_of(tmp_path), (1, 2, 2, 1, 1)), list[int]()
    job = joined_job(0, 1, 2, 3, num_began=4)
    job.leave = lambda: left.append(1)
    live.begin(job)
    assert live.leave_job([each == "1" for each in asked]) == goes_on
    assert len(left) == leaves


def test_a_generation_sets_its_process_up_as_any_run_does(tmp_path, monkeypatch):
    done: list[object] = []
    for name in ("keep_lines_whole", "keep_freed_memory", "claim_files_of_ranks"):
        monkeypatch.setattr(f"tonari.trainer.run.live.{name}", lambda *its: done.extend(its or [0]))
    live = Live(config_of(tmp_path), (1, 2, 1, 1, 1))
    live.begin(joined_job(0, 1, num_began=2))
    with live.joined():
        assert done == [0, 0, 2]


def test_lines_of_a_step_are_kept_only_while_a_rank_that_has_it_is_there(tmp_path):
    live = Live(config_of(tmp_path, "mesh.dp_replicate=2"), (1, 2, 1, 1, 1))
    live._steps = 7

    def job(other: list[float]) -> LiveJob:
        def allgather(mine: bytes, *, doing: str) -> list[bytes]:
            return [mine, json.dumps(other).encode()]

        world = SimpleNamespace(rank=0, world_size=2, allgather=allgather)
        return cast(LiveJob, SimpleNamespace(number=7, world=world, ranks=(0, 1), num_began=2))

    live.begin(job([8, 0.0, 8]))
    assert live.progress.steps == 8
    # It dies before this rank has what it had.
    live.begin(job([7, 0.0, 7]))
    assert live.progress.steps == 7


@pytest.mark.parametrize(
    ("before", "now", "rows", "accumulate"),
    [(3, 2, 6, 2), (4, 2, 8, 2), (4, 3, 5, 2), (3, 3, 8, 1), (2, 4, 4, 1), (1, 9, 1, 1)],
)
def test_a_step_keeps_its_rows_where_they_divide(tmp_path, before, now, rows, accumulate):
    config = same_rows(config_of(tmp_path, f"mesh.dp_replicate={before}"), before=before, now=now)
    assert (config.data.batch_size, config.optimizer.accumulate) == (rows, accumulate)


@pytest.mark.parametrize(
    ("sizes", "settings", "words"),
    [
        ((1, 2, 1, 1, 1), ["run.device=cuda"], 'run.device is "cuda"'),
        ((1, 1, 2, 1, 2), [], "all 4 ranks are one replica"),
        ((2, 2, 1, 1, 1), [], r"mesh.pp = 2 and optimizer.clip = 0"),
        ((1, 1, 4, 1, 1), [], r"mesh.dp_shard = 4 and optimizer.clip = 0"),
        ((1, 2, 1, 2, 1), [], r"mesh.cp takes 2 ranks"),
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
def test_ranks_of_a_launcher_that_ends_all_with_the_first_are_refused(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WorldError, match="expected by what lets the others live on"):
        loop.train(config_of(tmp_path))


def test_ranks_that_make_up_no_replica_cannot_join(tmp_path, monkeypatch):
    environ = {**TORCHRUN, "TONARI_LIVE_JOIN": "1", "WORLD_SIZE": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"dp_shard 2 .* is 2 ranks, but the job has 1; start"):
        loop.train(config_of(tmp_path, "mesh.dp_replicate=2", "mesh.dp_shard=2"))
