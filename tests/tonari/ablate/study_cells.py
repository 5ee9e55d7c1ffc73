"""Cells of a study that was never trained: figures as a test wants them."""

from collections.abc import Mapping
from typing import Any

from tonari.ablate.grid import leaves
from tonari.ablate.study import LABELS, Arm, Study, StudyConfig
from tonari.trainer.config.settings import apply_override

FULL_S = 100.0
EPOCHS = 5


def make_study(arms: Mapping[str, Mapping[str, Any]], *, seeds: int = 5) -> Study:
    """A study of these arms and settings; the first arm is the baseline."""
    baseline = next(iter(arms))
    return Study(
        StudyConfig(baseline=baseline, seeds=seeds),
        tuple(
            Arm(name, tables_of(own), own.get("against", baseline), own.get("control", ""))
            for name, own in arms.items()
        ),
    )


def tables_of(own: Mapping[str, Any]) -> dict[str, object]:
    tables: dict[str, object] = {"data": {"train": "train.parquet", "test": "test.parquet"}}
    for path, value in leaves({k: v for k, v in own.items() if k not in LABELS}):
        apply_override(tables, path, value)
    return tables


def make_cell(
    settings: Mapping[str, object], *, accuracy: float, train_s: float, seed: int = 0
) -> dict[str, object]:
    """A cell that took so long to so many points, straight up from 10."""
    share = train_s / FULL_S
    return {
        "arm": "", "seed": seed, "accuracy": accuracy / 100, "test_loss": 1.0,
        "wall_s": train_s + 5, "train_s": train_s, "rows_trained": int(1e6 * share),
        "cost_rows": 1.1e6 * share, "hidden_fraction": max(1 - share, 0),
        "hidden_precision": None, "hidden_recall": None,
        "epochs": [
            {
                "epoch": epoch, "loss": 1.0,
                "accuracy": None if epoch % 2 else
                (10 + (accuracy - 10) * (epoch + 1) / EPOCHS) / 100,
                "test_loss": None if epoch % 2 else 1.0,
                "train_s": train_s * (epoch + 1) / EPOCHS,
            }
            for epoch in range(EPOCHS)
        ],
        "settings": dict(settings), "device": "cpu", "torch": "2.13.0",
        "commit": "0123456789ab", "command": "tonari ablate s.toml", "date": "2026-11-21T10:00:00",
    }  # fmt: skip


EPOCHS_CONTROL = {"control": "epochs"}
RANDOM_CONTROL = {"control": "random", "importance": {"kind": "random"}}
POLICY = {"importance": {"kind": "kakurenbo"}}
