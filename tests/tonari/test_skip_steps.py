"""Steps that `tonari train --skip-steps` passes over; the others are what they would have been."""

from pathlib import Path
from typing import Any

import pytest

from dataio.base.lines import read_checked_lines
from tests.multirank import launch_command, run_job
from tests.trainer.digits import write_config
from tonari import cli, rows
from tonari.trainer.run import loop

ACCUMULATE, EPOCH = 2, 4
"""Batches of a step, and steps of an epoch: 7 batches of 16."""

Seen = dict[int, tuple[tuple[int, ...], float]]
"""By step: the samples it trained, and its learning rate."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Record each step that is trained."""
    found: Seen = {}
    step: Any = vars(loop)["train_step"]

    def noted(pipeline: Any, optimizer: Any, loader: Any, batches: Any, **how: Any) -> Any:
        ids = [i for batch in batches for i in batch["sample_id"].tolist() if i >= 0]
        found[how["step"] + 1] = tuple(ids), optimizer.param_groups[0]["lr"]
        return step(pipeline, optimizer, loader, batches, **how)

    monkeypatch.setattr(loop, "train_step", noted)
    return found


def train(directory: Path, *argv: str, status: int = 0) -> None:
    given = [
        "train", str(directory / "run.toml"), f"run.directory={directory / 'run'}",
        "run.checkpoint_steps=1", "run.keep_checkpoints=99", f"optimizer.accumulate={ACCUMULATE}",
        "optimizer.schedule_by=step", *argv,
    ]  # fmt: skip
    assert cli.main(given) == status


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    write_config(tmp_path)
    return tmp_path


def named(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "run" / "checkpoints").iterdir())


def test_skipped_steps_train_nothing_and_the_others_are_what_they_were(ready, seen) -> None:
    train(ready, "run.epochs=2")
    before = dict(seen)
    assert set(before) == set(range(1, 9))
    seen.clear()
    # Back before step 3, which is found by itself; 4 is the last, short one of its epoch
    train(ready, "run.epochs=3", "--skip-steps", "3:5", "--skip-steps", "6:8")
    assert set(seen) == {5, 8, 9, 10, 11, 12}
    assert {step: seen[step][0] for step in (5, 8)} == {step: before[step][0] for step in (5, 8)}
    assert "step-00000008.later" in named(ready)
    answered = rows.open(ready / "run")
    assert answered.num_steps == 12
    for step in range(1, 13):
        table = answered.at(step=step)
        expected = (before if step < 9 else seen)[step][0]
        assert sorted(table["sample_id"].to_pylist()) == sorted(expected)
        words = "skipped" if step in (3, 4, 6, 7) else "trained"
        assert set(table["what"].to_pylist()) == {words}
        assert all(table["kept"].to_pylist())
    first = answered.of(sample_id=before[3][0]).to_pylist()
    kept = [row["what"] for row in first if row["kept"] and row["epoch"] == 0]
    assert kept == ["skipped"] * len(before[3][0]), "once each, and nothing else of that epoch"
    lines = [*read_checked_lines(ready / "run/metrics.jsonl")]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == [1, 2, 5, 8, 9, 10, 11, 12]


def test_the_learning_rate_is_that_of_the_step(ready, seen) -> None:
    train(ready, "run.epochs=2")
    before = dict(seen)
    seen.clear()
    train(ready, "run.epochs=2", "--skip-steps", "2:4")
    assert seen == {step: before[step] for step in (4, 5, 6, 7, 8)}


def test_a_later_resume_keeps_what_was_skipped_on_other_batches_too(ready, seen) -> None:
    train(ready, "run.epochs=1", "--skip-steps", "2:3")
    gone = set(rows.open(ready / "run").at(step=2)["sample_id"].to_pylist())
    (ready / "run/checkpoints/step-00000004").rename(ready / "run/checkpoints/step-00000004.off")
    seen.clear()
    train(ready, "run.epochs=2", "data.batch_size=5", "--skip-steps", "2:3")
    assert min(seen) == 4
    rest = [i for step in range(4, 7) for i in seen[step][0]]
    assert not gone & set(rest[: 100 - 3 * 32])
    answered = rows.open(ready / "run").of(sample_id=gone).to_pylist()
    assert {(r["epoch"], r["what"]) for r in answered if r["kept"]} == {
        (0, "skipped"), (1, "trained"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["3"], "expected A:B with 1 <= A < B"),
        (["5:4"], "expected A:B with 1 <= A < B"),
        (["2:4", "--skip-steps", "3:5"], "--skip-steps 2:4 and 3:5 overlap"),
        (["3:6"], "an epoch ends with step 4, expected steps of one epoch; give --skip-steps 3:5 "
                  "--skip-steps 5:6"),
        (["70:80"], "the run's last step is 8, expected steps before it"),
        (["7:9"], "the run's last step is 8, expected steps before it"),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_skipped_are_one_message(ready, capsys, argv, message) -> None:
    train(ready, "run.epochs=2", "--skip-steps", *argv, status=1)
    shown = capsys.readouterr().err
    assert message in shown
    # What is trained may be said before it
    assert len([line for line in shown.splitlines() if not line.startswith("training ")]) == 1


def test_a_checkpoint_behind_the_steps_is_one_message(ready, seen, capsys) -> None:
    train(ready, "run.epochs=1")
    later = ready / "run/checkpoints/step-00000003"
    train(ready, "run.epochs=2", "--skip-steps", "2:3", "--resume", str(later), status=1)
    assert "has 3 steps behind it, expected a checkpoint of step 1 or" in capsys.readouterr().err
    train(ready, "run.epochs=2", "--skip-steps", "1:3", status=1)
    assert "all 4 checkpoints have trained steps of --skip-steps" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.multirank
def test_all_ranks_of_a_pipeline_skip_the_same_steps(ready) -> None:
    ended = run_job(
        [
            *launch_command("mpiexec", 2),
            "-m", "tonari", "train", str(ready / "run.toml"),
            f"run.directory={ready / 'run'}", "run.epochs=2", "mesh.pp=2",
            "importance.kind=kakurenbo", "importance.fraction=0.2", "data.image_size=16",
            "model.image_size=16", "--skip-steps", "3:5",
        ],
        env=None, timeout_s=200,
    )  # fmt: skip
    assert ended[0] == 0, ended[1]
    lines = [*read_checked_lines(ready / "run/metrics.jsonl")]
    assert next(line["step"] for line in lines if line["kind"] == "epoch") == 7
    assert [line["step"] for line in lines if line["kind"] == "step"][:5] == [1, 2, 5, 6, 7]
    answered = rows.open(ready / "run")
    whats = [set(answered.at(step=step)["what"].to_pylist()) for step in range(2, 6)]
    assert whats == [{"trained"}, {"skipped"}, {"skipped"}, {"trained"}]
