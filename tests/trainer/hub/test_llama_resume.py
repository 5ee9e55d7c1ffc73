"""A llama that is stopped goes on, on other meshes, as one process that was never stopped."""

from pathlib import Path

import pytest

from dataio.base.lines import read_checked_lines
from tests.multirank import RunRanks
from tests.trainer.watch.watched import train_watched

pytestmark = [pytest.mark.multirank, pytest.mark.nightly]

TOML = """
[data]
kind = "text"
train = "{root}/text"
test_fraction = 0.2
sequence_length = 16
batch_size = 8
workers.threads = 0
[shuffle]
exchange = 0.1
[model]
kind = "llama"
width = 16
depth = 4
heads = 4
kv_heads = 2
[optimizer]
kind = "adamw"
lr = 0.01
clip = 1.0
[mesh]
dtype = "float64"
[run]
epochs = 2
log_steps = 1
checkpoint_epochs = 0
device = "cpu"
"""
HALVES = ("mesh.dp_shard=2", "data.batch_size=4")


def losses(directory: Path) -> list[float]:
    """Read every step's loss and gradient norm, and the evaluations."""
    lines = [*read_checked_lines(directory / "metrics.jsonl")]
    names = {"step": ("loss", "gradient_norm"), "epoch": ("loss", "evaluation_loss")}
    return [line[name] for line in lines for name in names[line["kind"]] if name in line]


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ((), ("mesh.pp=2", "mesh.tp=2", "mesh.schedule=zbv"), ("mesh.pp=2", *HALVES)),
        (
            ("model.tied=true", "model.rope={theta = 300.0}"),
            ("mesh.tp=2", "mesh.sequence_parallel=true", *HALVES), ("mesh.cp=2", *HALVES),
        ),
    ],
    ids=["pp", "tied"],
)  # fmt: skip
def test_a_stopped_run_goes_on_with_the_losses_of_one_process(
    tmp_path: Path, run_ranks: RunRanks, model: tuple[str, ...], first: tuple[str, ...],
    second: tuple[str, ...],
) -> None:  # fmt: skip
    (tmp_path / "text").write_text(100 * "the cat sat on the mat. ")
    settings = tmp_path / "run.toml"
    settings.write_text(TOML.format(root=tmp_path))
    # 15 steps an epoch.
    whole = ("run.directory=" + str(tmp_path / "whole"), f"data.cache={tmp_path}/a")
    chain = ("run.directory=" + str(tmp_path / "chain"), *model)
    train_watched(settings, *model, *whole)
    cases = [
        "|".join([str(settings), *chain, *mesh, f"data.cache={tmp_path}/{number}", f"stop={steps}"])
        for number, (mesh, steps) in enumerate([(first, 7), (second, 9)])
    ]
    run_ranks("trainer/meshes", 4, *cases, timeout_s=200)
    train_watched(settings, *chain, f"data.cache={tmp_path}/b")
    expected = losses(tmp_path / "whole")
    assert len(expected) > 2 * 20
    assert losses(tmp_path / "chain") == pytest.approx(expected, rel=1e-9)
