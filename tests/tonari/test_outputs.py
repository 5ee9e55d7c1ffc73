"""A result that could not be written is refused before the work, not after it."""

import pytest

from tonari.bench.command import main as bench
from tonari.cli import main
from tonari.errors import CommandError
from tonari.outputs import check_output, check_plot


@pytest.mark.parametrize("command", ["loader", "exchange"])
@pytest.mark.parametrize("flag", ["--csv", "--json-file", "--plot"])
def test_a_benchmark_begins_nothing_whose_result_it_could_not_write(
    tmp_path, monkeypatch, command, flag
):
    for work in ("command.measure_loaders", "exchange.command.measure_exchange"):
        monkeypatch.setattr(f"tonari.bench.{work}", lambda *_: pytest.fail("it was begun"))
    with pytest.raises(CommandError, match=rf"{flag} .*found no directory .*make it first"):
        bench([command, flag, str(tmp_path / "none" / "out.png")])


def test_a_directory_is_no_file_to_write(tmp_path):
    with pytest.raises(CommandError, match=r"--csv .*cannot be written.*name another"):
        check_output("--csv", tmp_path)
    check_output("--csv", tmp_path / "new.csv")
    check_output("--csv", None)


def test_a_plot_is_refused_where_its_name_says_no_kind(tmp_path):
    with pytest.raises(CommandError, match=r"--plot .*a\.txt: expected a name that ends in \.png"):
        check_plot("--plot", tmp_path / "a.txt")
    check_plot("--plot", tmp_path / "a.pdf")


def test_a_study_that_cannot_write_says_that_its_cells_are_whole(tmp_path, capsys, monkeypatch):
    study = tmp_path / "study.toml"
    study.write_text("")
    monkeypatch.setattr("tonari.ablate.study.load_study", lambda *_, **__: None)
    monkeypatch.setattr("tonari.ablate.command._asked", lambda *_: [])

    def full(*_, **__):
        raise OSError(28, "No space left on device", "cells/a.json")

    monkeypatch.setattr("tonari.ablate.call.read_cells", full)
    assert main(["ablate", str(study), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "the same command goes on" in said
