"""What a run notes of itself, over several starts."""

import re
import shutil
from pathlib import Path

import pytest

from tests.trainer.run.runs import run, stop_after
from tonari import cli
from tonari.trainer.watch.record import Noted, Record, Start, read_run, state_of


def test_a_run_that_went_on_is_one_run_with_one_curve(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = config.parent / "run"
    with monkeypatch.context() as patched:
        stop_after(patched, 10)
        run(config, "run", "run.checkpoint_steps=4")
    first = read_run(directory)
    assert [start.how for start in first.starts] == ["stopped by SIGTERM"]
    assert state_of(directory, first.starts) == "stopped"
    checkpoints = sorted((directory / "checkpoints").iterdir())
    run(config, "run", resume=str(checkpoints[0]))
    record = read_run(directory)
    assert [(start.from_step, start.how) for start in record.starts] == [
        (0, "stopped by SIGTERM"), (8, "complete")
    ]  # fmt: skip
    page = (directory / "run.html").read_text()
    assert f"Complete: step {record.planned_steps} of {record.planned_steps} (100%)" in page
    curves = [c.split() for c in re.findall(r'<polyline points="([^"]*)"', page)]
    places = [float(point.split(",")[0]) for point in curves[0]]
    assert len(places) == record.planned_steps, "steps 9 and 10 were trained twice"
    assert places == sorted({*places})
    capsys.readouterr()
    anew = config.parent / "anew.html"
    assert cli.main(["runs", str(directory), "--html", str(anew)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {anew}\n")
    assert _undated(anew.read_text()) == _undated(page)


def test_a_run_that_starts_anew_forgets_the_one_before(config: Path) -> None:
    run(config, "run", "run.epochs=1")
    shutil.rmtree(config.parent / "run" / "checkpoints")
    run(config, "run", "run.epochs=1")
    assert [start.from_step for start in read_run(config.parent / "run").starts] == [0]


def test_a_run_that_fails_is_noted_as_failed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr("tonari.trainer.run.loop.train_step", fail)
    with pytest.raises(RuntimeError):
        run(config, "run")
    record = read_run(config.parent / "run")
    assert record.starts[0].how == "RuntimeError: no more"
    assert "<p>RuntimeError: no more: step 0 of" in (config.parent / "run" / "run.html").read_text()


def _undated(page: str) -> str:
    return re.sub(r"page written.*", "", page)


def test_what_ended_a_run_is_raised_where_it_cannot_be_noted(tmp_path, monkeypatch, caplog):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def fails() -> None:
        with Noted(tmp_path, Record([Start(0.0, 1)])):
            monkeypatch.setattr("tonari.trainer.watch.record.write_record", full)
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fails()
    assert "how the run ended could not be noted ([Errno 28] No space left" in caplog.text
