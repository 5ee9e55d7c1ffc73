"""docs/weather.md: its example runs on what the generator writes and prints what the page has."""

import pytest

from tests.docs.blocks import blocks_of
from tests.multirank import ROOT

BLOCKS = blocks_of(ROOT / "docs/weather.md")


def test_the_example_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    pytest.importorskip("zarr", minversion="3", reason="tonari[zarr]")
    from examples.anemoi_data import write_dataset

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "cache"))
    write_dataset(tmp_path / "weather.zarr")
    example, printed = (
        next(block.text for block in BLOCKS if block.language == language)
        for language in ("python", "text")
    )
    exec(compile(example, "docs/weather.md", "exec"), {})
    assert capsys.readouterr().out == printed
