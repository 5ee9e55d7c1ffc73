"""What is said of long work: on a terminal, and in a log."""

import sys

import pytest

from dataio.base import progress
from dataio.base.progress import ProgressBar
from tests.stand_ins import SetClock


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, terminal: bool,
         rows_at: list[tuple[float, int]], shown: bool = True) -> str:  # fmt: skip
    """Count rows at times in seconds; the bar is closed at the last."""
    clock = SetClock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    bar = ProgressBar("staging", 600, shown=shown)
    for now, rows in rows_at:
        clock.now = now
        bar.add(rows, num_bytes=rows * 1_000_000)
    bar.close()
    return capsys.readouterr().err


def test_a_log_has_a_line_every_30_s_and_one_at_the_end(monkeypatch, capsys):
    rows_at = [(4.0, 0), (6.0, 0), (20.0, 100), (40.0, 100), (41.0, 100), (400.0, 300)]
    assert said(monkeypatch, capsys, terminal=False, rows_at=rows_at).splitlines() == [
        "staging: 0/600 rows, 0 rows/s, not begun",
        "staging: 200/600 rows, 200 MB, 5 rows/s, 5 MB/s, 80 s left",
        "staging: 600/600 rows, 600 MB, 2 rows/s, 2 MB/s, 0 s left",
        "staging: 600/600 rows, 600 MB, 2 rows/s, 2 MB/s, 6.7 min",
    ]


def test_a_terminal_has_one_line_that_changes_and_goes(monkeypatch, capsys):
    text = said(monkeypatch, capsys, terminal=True, rows_at=[(1.0, 100), (2.5, 100), (2.6, 400)])
    assert text == "\rstaging: 200/600 rows, 200 MB, 80 rows/s, 80 MB/s, 5 s left\x1b[K\r\x1b[K"


@pytest.mark.parametrize("terminal", [True, False])
def test_quick_work_and_other_ranks_say_nothing(monkeypatch, capsys, terminal):
    assert said(monkeypatch, capsys, terminal=terminal, rows_at=[(1.9, 600)]) == ""
    assert said(monkeypatch, capsys, terminal=terminal, rows_at=[(99, 9)], shown=False) == ""
