"""Cells of a study that was never trained: figures as a test wants them."""

from collections.abc import Mapping
from dataclasses import fields

from tonari.ablate.study.config import Arm, DataConfig, SettingsConfig, Study, StudyConfig

FULL_S = 100.0
EPOCHS = 5


def make_study(arms: Mapping[str, Mapping[str, object]], *, seeds: int = 5) -> Study:
    """A study of these arms and settings; the first arm is the baseline."""
    known = {field.name for field in fields(SettingsConfig)}
    baseline = next(iter(arms))
    return Study(
        StudyConfig(baseline=baseline, seeds=seeds),
        DataConfig(train="train.parquet", test="test.parquet", image_size=32),
        tuple(
            Arm(
                name,
                SettingsConfig(**{k: v for k, v in own.items() if k in known}),  # type: ignore[arg-type]
                str(own.get("against") or baseline),
            )
            for name, own in arms.items()
        ),
    )


def make_cell(
    settings: Mapping[str, object], *, accuracy: float, train_s: float, seed: int = 0
) -> dict[str, object]:
    """A cell that took so long to so many points, straight up from 10."""
    share = train_s / FULL_S
    return {
        "arm": "", "seed": seed, "accuracy": accuracy / 100, "wall_s": train_s + 5,
        "cpu_s": train_s + 4, "train_s": train_s, "rows_trained": int(1e6 * share),
        "rows_refreshed": 1000, "flops": 1e15 * share, "hidden_fraction": max(1 - share, 0),
        "epochs": [
            {
                "epoch": epoch, "loss": 1.0,
                "accuracy": None if epoch % 2 else
                (10 + (accuracy - 10) * (epoch + 1) / EPOCHS) / 100,
                "train_s": train_s * (epoch + 1) / EPOCHS,
            }
            for epoch in range(EPOCHS)
        ],
        "settings": dict(settings), "data": {}, "device": "cpu", "torch": "2.13.0",
        "commit": "0123456789ab", "command": "tonari ablate s.toml", "date": "2026-11-21T10:00:00",
    }  # fmt: skip


EPOCHS_CONTROL = {"control": "epochs"}
RANDOM_CONTROL = {"control": "random", "importance": "random"}
POLICY = {"importance": "kakurenbo"}
