"""Tables: words left, figures right, and nothing that is not known is made up."""

import sys

import pytest

from tonari.report.tables import Table, figure, to_csv

RANKS = Table(
    ("way", "epoch", "MB/s", "note"),
    [["local", "1.5 s", "-", ""], ["exchange", "12 s", "+30", "2 runs"], ["get", "-", ".5", "?"]],
)


def test_words_are_set_left_and_figures_right() -> None:
    assert RANKS.text() == [
        "way       epoch  MB/s  note",
        "local     1.5 s     -",
        "exchange   12 s   +30  2 runs",
        "get           -    .5  ?",
    ]
    assert RANKS.are_figures == [False, True, True, False]


@pytest.mark.parametrize(("columns", "num_lines"), [(29, 4), (28, 9), (22, 9), (17, 14), (16, 14)])
def test_a_narrow_terminal_has_the_columns_in_parts(
    monkeypatch: pytest.MonkeyPatch, columns: int, num_lines: int
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    found = RANKS.text()
    assert len(found) == num_lines
    assert max(map(len, found)) <= columns
    if columns == 22:
        assert found[4:] == [
            "",
            "way       note",
            "local",
            "exchange  2 runs",
            "get       ?",
        ]


def test_a_terminal_breaks_long_words_and_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(("mesh", "epoch", "why"), [["dp 2", "+12.25 s", "the links are " * 4]])
    assert len(table.text()) == 2
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "48")
    assert table.text() == [
        "mesh     epoch  why",
        "dp 2  +12.25 s  the links are the links are the",
        "                links are the links are",
    ]


def test_rows_are_indented_below_a_title() -> None:
    table = Table(("epoch", "1"), [["Local", "0.5"]], "distance")
    assert table.text() == ["distance", "  epoch    1", "  Local  0.5"]


def test_without_rows_the_heads_remain() -> None:
    assert Table(("a", "bc"), []).text() == ["a  bc"]
    assert Table((), []).text() == [""]
    assert Table(("a", "bc"), []).markdown() == ["| a | bc |", "| --- | --- |"]


def test_markdown_has_the_same_cells() -> None:
    assert RANKS.markdown()[:3] == [
        "| way | epoch | MB/s | note |",
        "| --- | ---: | ---: | --- |",
        "| local | 1.5 s | - |  |",
    ]


def test_a_figure_that_nobody_knows_is_a_dash() -> None:
    found = [figure(value, ",.1f", of=1e6) for value in (1_234_567_890, 0, None, "?")]
    assert found == ["1,234.6", "0.0", "-", "-"]


def test_csv_has_the_columns_that_are_named_and_leaves_empty_what_a_row_has_not() -> None:
    rows: list[dict[str, object]] = [{"a": 1, "b": 'x, "y"', "c": 0}, {"b": None, "a": 2}]
    assert to_csv(("b", "a"), rows) == 'b,a\n"x, ""y""",1\n,2\n'
