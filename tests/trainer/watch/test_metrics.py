import json
import sys
from pathlib import Path

import pytest
import torch

from dataio.base.lines import read_checked_lines
from tests.stand_ins import SetClock
from tonari.trainer.errors import ConfigError
from tonari.trainer.watch import metrics
from tonari.trainer.watch.metrics import Board, MetricsLog, ProgressLine, progress_words
from tonari.trainer.watch.peak import mfu, peak_flops_per_s
from tonari.trainer.watch.profile import StepTrace


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write(path: Path, *numbers: int, after_step: int | None = None) -> None:
    with MetricsLog(path, after_step=after_step) as log:
        for number in numbers:
            log.write({"kind": "step", "step": number})


def test_what_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write({"kind": "step", "step": 1, "loss": float("nan"), "lr": float("inf")})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    json.loads(line, parse_constant=pytest.fail)
    assert [*read_checked_lines(tmp_path / "metrics.jsonl")] == [
        {"kind": "step", "step": 1, "loss": None, "lr": None}
    ]


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


@pytest.mark.parametrize("byte", [b"\x92", b"0", b"6"])
def test_a_damaged_line_is_kept_and_named_and_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, byte: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3)
    damaged = path.read_bytes().replace(b'"step": 2', b'"step": ' + byte)
    path.write_bytes(damaged)
    write(path, 3, after_step=2)
    first, second, third = path.read_bytes().splitlines()
    assert (json.loads(first)["step"], second, json.loads(third)["step"]) == (
        1, damaged.splitlines()[1], 3,
    )  # fmt: skip
    assert "metrics.jsonl: line 2 is damaged" in caplog.text


def test_a_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write({"step": 1})
        assert steps(log.path) == [1]


@pytest.mark.parametrize("shown", [True, False])
def test_a_log_has_what_is_trained_and_recent_steps_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], shown: bool
) -> None:
    clock = SetClock()
    monkeypatch.setattr(metrics, "time", clock)
    with ProgressLine(shown=shown) as line:
        line.begin("training gpt")
        for now in (1.0, 61.0, 62.0, 130.0):
            clock.now = now
            line.count(1, of=2)
            line.say(f"at {now:.0f} s")
    said = "training gpt\nat 61 s\nat 130 s\n" if shown else ""
    assert capfd.readouterr() == ("", said)


def test_the_progress_line_says_what_is_known_and_leaves_out_the_rest() -> None:
    line = {
        "epoch": 1, "step": 20, "loss": 2.5, "samples_per_s": 1234.5, "tokens_per_s": 9876.5,
        "mfu": 0.41, "wait_fraction": 0.02, "hidden_fraction": 0.3,
        "exchange_overlap_fraction": 0.98,
    }  # fmt: skip
    assert progress_words(line) == (
        "epoch 1, step 20, loss 2.5000, 1,234 samples/s, 9,876 tokens/s, MFU 41.0%, wait 2%, "
        "hidden 30%, overlap 98%"
    )
    assert progress_words({"epoch": 0, "step": 1, "loss": None, "mfu": None}) == "epoch 0, step 1"


def test_without_tensorboard_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[tensorboard\]', or set run"):
        Board(tmp_path)


def test_utilisation_is_known_only_where_the_peak_is() -> None:
    cpu = torch.device("cpu")
    assert peak_flops_per_s(cpu, dtype="bfloat16") == 0
    assert peak_flops_per_s(cpu, dtype="float32", stated_tflops=2) == 2e12
    assert mfu(10, flops_per_row=5, peak=0, world_size=2) is None
    # 10 samples/s x 3 passes x 1e9 of 2 devices' 1e11 together
    assert mfu(10, flops_per_row=10**9, peak=1e11, world_size=2) == pytest.approx(0.15)


def test_only_the_steps_asked_for_are_traced(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    with StepTrace((2, 3), directory=tmp_path, rank=5, device=cpu) as trace:
        for number in range(1, 6):
            trace.step()
            with torch.profiler.record_function(f"work {number}"):
                torch.zeros(number)
    traced = json.loads((tmp_path / "trace-5.json").read_text())["traceEvents"]
    names = {str(event.get("name")) for event in traced}
    assert {name for name in names if name.startswith("work")} == {"work 2", "work 3"}
