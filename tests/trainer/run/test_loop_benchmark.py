"""The benchmark of whole runs: what it counts as busy, and that every way runs."""

import json
from pathlib import Path

import pytest

from benchmarks.studies import trainer_loop
from benchmarks.studies.trainer_loop import covered_us


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
    settings = ["model.width=8", "model.depth=1", "model.heads=2"]
    command = ["trainer_loop", *map(str, given), *settings, "--models", "vit", "gpt"]
    monkeypatch.setattr("sys.argv", command)
    trainer_loop.main()
    skipped, figures = map(json.loads, capsys.readouterr().out.splitlines())
    assert "absent is not there" in skipped["skipped"]
    assert (figures["steps"], figures["repeats"]) == (2, 2)
    for way in ("bare", "memory"):
        assert figures[f"wall_ratio_to_{way}"] > 0
        assert figures[f"{way}_step_ms"] > 0
