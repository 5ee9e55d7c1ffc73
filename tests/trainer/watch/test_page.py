"""The page of a run: what it shows of many lines, when it is written, and that it ends no run."""

import re
from pathlib import Path

import pytest

from tonari.trainer.watch.history import MOST, History
from tonari.trainer.watch.metrics import Line
from tonari.trainer.watch.page import EVERY_S, PAGE, RunPage
from tonari.trainer.watch.record import COMPLETE, Noted, Record, Settings, Start, state_of

SETTINGS: Settings = {"model": {"kind": "gpt"}, "data": {"train": "a.txt"}, "run": {"epochs": 3}}


def step(number: int, loss: float = 1.0) -> Line:
    return {"kind": "step", "epoch": 0, "step": number, "loss": loss, "lr": 0.1}


def noted(directory: Path) -> Noted:
    return Noted(directory, Record([Start(100.0, 2)], 40), clock=lambda: 130.0)


def test_a_long_run_is_drawn_whole_by_few_points_that_keep_its_mean_and_its_peak() -> None:
    history = History()
    for number in range(1, 10_001):
        history.add(step(number, 50.0 if number == 7_000 else 1 + number % 2))
    curve = history.curve("step", "loss", "")
    assert MOST <= len(curve.points) <= 2 * MOST
    assert curve.points[-1][0] == 10_000
    assert [loss for _, loss in curve.points[:9]] == [1.5] * 9
    assert max(high for _, high in curve.band) == 50
    (spike,) = history.spikes()
    assert 7_000 in spike.logged.steps


def test_lines_that_are_not_finite_are_a_gap_and_a_spike() -> None:
    history = History()
    for number in range(1, 40):
        history.add(step(number, float("nan") if number == 20 else 1.0))
    assert len(history.curve("step", "loss", "").points) == 38
    assert [spike.logged.steps for spike in history.spikes()] == [range(20, 21)]


def test_it_is_written_at_once_then_once_a_minute_and_at_the_end(tmp_path: Path) -> None:
    now, page = [0.0], tmp_path / PAGE
    kept = noted(tmp_path)
    with RunPage(tmp_path, kept, SETTINGS, clock=lambda: now[0]) as written, kept:
        shown = []
        for number, passed_s in enumerate((0.0, EVERY_S - 1, 1.0, 1.0), 1):
            now[0] += passed_s
            written.write(step(number))
            shown += re.findall(r"Running: step (\d+) of 40", page.read_text())
        kept.end(COMPLETE, 4)
    assert shown == ["1", "1", "3", "3"]
    assert "Complete: step 4 of 4 (100%)" in page.read_text()
    assert page.stat().st_mode & 0o044, "whoever may read the directory may read it"


def test_a_page_that_cannot_be_written_ends_no_run_and_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / PAGE).mkdir()
    kept, now = noted(tmp_path), [0.0]
    with RunPage(tmp_path, kept, SETTINGS, clock=lambda: now[0]) as page, kept:
        for number in (1, 2):
            now[0] += EVERY_S
            page.write(step(number))
    (record,) = caplog.records
    assert "run.html: cannot be written (IsADirectoryError" in record.getMessage()


def test_how_a_run_ended_is_noted_and_an_error_by_its_name(tmp_path: Path) -> None:
    kept = noted(tmp_path)
    with pytest.raises(ValueError, match="loss"), kept:
        raise ValueError("the loss is lost")
    (start,) = kept.record.starts
    assert (start.how, start.ended_s) == ("ValueError: the loss is lost", 130.0)
    assert state_of(tmp_path, kept.record.starts) == "failed"
