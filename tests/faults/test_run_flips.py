"""Single flipped bits and cut files of a run's directory: the same answers, or an error by name.

What is asked rests on the log of rows, the metrics, the settings and the checkpoints.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataio import DataioError
from tests.faults.damage import cut, files_below, flip, kind_of, restore
from tests.trainer.digits import write_config, write_shard
from tonari import cli, rows
from tonari.certify.claims import exactly_once, never
from tonari.errors import CommandError
from tonari.rows.spikes import read_losses
from tonari.trainer.checkpoint.directory import whole_checkpoints
from tonari.trainer.checkpoint.export import read_checkpoint
from tonari.trainer.config.saved import read_settings
from tonari.trainer.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.thorough

EVERY = bool(os.environ.get("TONARI_LONG"))
FLIPS, CUTS = (500, 150) if EVERY else (60, 30)
NAMED = (DataioError, CommandError, ConfigError, CheckpointError)
UNASKED = ("run.lock",)
"""Nothing rests on it: its lock decides."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that hid and excluded rows, was stopped amid an epoch, and went on."""
    here = tmp_path_factory.mktemp("run")
    config = write_config(here)
    write_shard(here / "train-0.tar")
    (here / "out.csv").write_text("sample_id\n" + "\n".join(map(str, range(10, 20))) + "\n")
    for limit in ("run.max_steps=9", "run.max_steps=0"):
        given = [
            "train", str(config), f"data.train={here / 'train-0.tar'}", f"run.directory={here}/run",
            "run.epochs=2", "run.checkpoint_steps=4", "importance.kind=random",
            "importance.fraction=0.2", f"data.exclude={here / 'out.csv'}", "run.log_steps=1",
            *([limit] if limit != "run.max_steps=0" else []),
        ]  # fmt: skip
        assert cli.main(given) == 0
    return here


def answers(run: Path, shard: Path) -> dict[str, Callable[[], Any]]:
    """All that a run's directory is asked; each answer is compared with what it was."""

    def weights() -> dict[str, bytes]:
        (newest,) = whole_checkpoints(run / "checkpoints")[-1:]
        model = read_checkpoint(newest)["model"]
        return {
            name: value.numpy().tobytes()
            for name, value in model.items()
            if isinstance(value, torch.Tensor)
        }

    def opened() -> Any:
        return rows.open(run, source=str(shard))

    return {
        "rows": lambda: opened().of(sample_id=range(60)).to_pydict(),
        "never": lambda: never(opened(), [3, 12]),
        "exactly once": lambda: exactly_once(opened()),
        "losses": lambda: [(one.steps, one.loss) for one in read_losses(run)],
        "settings": lambda: read_settings(run / "config.json"),
        "weights": weights,
    }


def draw(run: Path, root: Path, *, damage: Any, count: int, seed: int) -> Counter[tuple[str, str]]:
    """Damage one file after the other, each as often as the others, and ask."""
    rng, files = np.random.default_rng(seed), files_below(run / "run")
    shard = run / "train-0.tar"
    truth = {what: ask() for what, ask in answers(run / "run", shard).items()}
    names = sorted(name for name in files if name not in UNASKED)
    outcomes: Counter[tuple[str, str]] = Counter()
    wrong = []
    for number in range(count):
        name = names[number % len(names)]
        here = root / str(number)
        restore(files, here)
        told = damage(here / name, rng)
        came = "the same answers"
        for what, ask in answers(here, shard).items():
            try:
                found = ask()
            except NAMED as error:
                came = type(error).__name__
                if str(root) not in str(error) or len(str(error)) > 1500:
                    wrong.append(f"{name} {told}: {what}: without a place, or too long: {error}")
            except Exception as error:
                if f"{here}: found no metrics.jsonl" in str(error):
                    came = "named as missing"
                    continue
                wrong.append(f"{name} {told}: {what}: {type(error).__name__}: {str(error)[:300]}")
            else:
                if found != truth[what]:
                    wrong.append(f"{name} {told}: {what}: another answer, and no word of it")
        outcomes[kind_of(here / name), came] += 1
        shutil.rmtree(here)
    for (file, came), times in sorted(outcomes.items()):
        print(f"{damage.__name__} {file}: {came}: {times}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)
    return outcomes


@pytest.mark.timeout(3600 if EVERY else 300)
def test_no_flipped_bit_of_a_run_gives_another_answer(run: Path, tmp_path: Path) -> None:
    outcomes = draw(run, tmp_path, damage=flip, count=FLIPS, seed=1)
    assert sum(outcomes.values()) == FLIPS


@pytest.mark.timeout(3600 if EVERY else 300)
def test_no_cut_file_of_a_run_gives_another_answer(run: Path, tmp_path: Path) -> None:
    outcomes = draw(run, tmp_path, damage=cut, count=CUTS, seed=2)
    assert sum(outcomes.values()) == CUTS
