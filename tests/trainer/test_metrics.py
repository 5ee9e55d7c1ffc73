import json
from pathlib import Path

import pytest

from trainer.metrics import MetricsLog, ProgressLine


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write(path: Path, *numbers: int, after_step: int | None = None) -> None:
    with MetricsLog(path, after_step=after_step) as log:
        for number in numbers:
            log.write({"kind": "step", "step": number})


def test_a_fresh_run_starts_an_empty_log(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    write(path, 1, 2)
    write(path, 3)
    assert steps(path) == [3]


def test_a_resumed_run_keeps_the_lines_up_to_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3)
    write(path, 3, 4, after_step=2)
    assert steps(path) == [1, 2, 3, 4]


def test_a_line_cut_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1)
    with path.open("a") as file:
        file.write('{"kind": "st')
    write(path, 2, after_step=5)
    assert steps(path) == [1, 2]


def test_a_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write({"step": 1})
        assert steps(log.path) == [1]


def test_without_a_terminal_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressLine(shown=True) as line:
        line.show("epoch 0", step=1, steps=2)
    assert capfd.readouterr() == ("", "")
