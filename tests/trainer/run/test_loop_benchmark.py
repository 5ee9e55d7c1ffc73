"""The benchmark of whole runs: what it counts as busy, and that every way runs."""

import argparse
import cProfile
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.studies import trainer_loop
from benchmarks.studies.trainer_loop import bare_loop, covered_us, make_config, open_loader
from dataio.job.launch import join
from tonari.trainer.run.loop import train
from tonari.trainer.watch.metrics import Line


def test_time_in_which_several_kernels_run_counts_once() -> None:
    spans = [(5.0, 7.0), (0.0, 4.0), (1.0, 2.0), (3.0, 4.5)]
    assert covered_us(spans) == 6.5
    assert covered_us([]) == 0


def test_every_way_trains_a_text_and_missing_images_are_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 60)
    given = ["--text", text, "--images", tmp_path / "absent", "--rows", 32, "--repeats", 2]
    command = ["trainer_loop", *map(str, given), "--tiny", "--models", "vit", "gpt"]
    monkeypatch.setattr("sys.argv", command)
    trainer_loop.main()
    skipped, figures = map(json.loads, capsys.readouterr().out.splitlines())
    assert "absent is not there" in skipped["skipped"]
    assert (figures["steps"], figures["repeats"]) == (16, 2)
    for way in ("bare", "memory"):
        assert figures[f"wall_ratio_to_{way}"] > 0
        assert figures[f"{way}_step_ms"] > 0
        assert figures[f"issuing_ratio_to_{way}"] > 0


MOST_CALLS = 210
"""Of functions, Python's and C's, that a step of the trainer makes beyond those of a bare loop."""


def test_a_step_issues_little_more_than_a_bare_loop(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 60)
    args = argparse.Namespace(
        rows=400, length=8, repeats=1, device="cpu", text=text, tiny=True, overrides=[]
    )
    calls = {"trainer": cProfile.Profile(), "bare": cProfile.Profile()}
    with join(device="cpu") as job:
        config = make_config("gpt", args, tmp_path)

        def second_epoch(line: Line) -> None:
            (calls["trainer"].enable if line["epoch"] == 0 else calls["trainer"].disable)()

        train(replace(config, run=replace(config.run, epochs=2)), on_epoch=second_epoch, quiet=True)
        with open_loader(config, job, tmp_path / "bare") as loader:
            epochs = loader.epochs(2)
            bare = bare_loop(config, job)
            next(epochs)
            bare(loader)
            next(epochs)
            with calls["bare"]:
                num_steps = bare(loader)
    per_step = {
        way: sum(each.callcount for each in profile.getstats()) / num_steps
        for way, profile in calls.items()
    }
    assert num_steps == 200
    assert per_step["trainer"] - per_step["bare"] < MOST_CALLS
