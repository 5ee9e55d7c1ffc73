"""docs/grids.md: its blocks run on a file as they describe it, and give what they say."""

import shlex

import numpy as np
import pytest
import torch

from tests.docs.blocks import blocks_of
from tests.multirank import ROOT, launch_command, run_job
from tonari import cli

BLOCKS = blocks_of(ROOT / "docs/grids.md")
EXAMPLE, PATCHES, NORMALISE, PAIRS, TILES = (b.text for b in BLOCKS if b.language == "python")
COMMAND, *PRINTED = (b.text for b in BLOCKS if b.language in ("bash", "text"))
TILES_PRINTED = next(text for text in PRINTED if text.startswith("rank 0"))
SIZES = {"time": 48, "lat": 128, "lon": 256}


@pytest.fixture
def given(tmp_path, monkeypatch):
    """A file of weather where the first block looks for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "cache"))
    zarr = pytest.importorskip("zarr", minversion="3", reason="tonari[zarr]")
    values = np.random.default_rng(0).normal(280, 5, tuple(SIZES.values())).astype(np.float32)
    group = zarr.open_group("era5.zarr", mode="w")
    for name, size in SIZES.items():
        kind = np.int64 if name == "time" else np.float32
        group.create_array(name, data=np.arange(size, dtype=kind), dimension_names=(name,))
    group.create_array("t2m", data=values, dimension_names=tuple(SIZES))
    land = np.ones(values.shape[1:], np.int8)
    group.create_array("land", data=land, dimension_names=tuple(SIZES)[1:])
    return {"written": values}


def test_the_command_prints_what_the_page_shows(given, capsys):
    assert cli.main(shlex.split(COMMAND)[1:]) == 0
    assert capsys.readouterr().out == PRINTED[0]


def test_the_recipes_give_tiles_patches_statistics_and_pairs(given):
    for block in (EXAMPLE, PATCHES, NORMALISE, PAIRS):
        exec(compile(block, "docs/grids.md", "exec"), given)
        if block is EXAMPLE:
            assert next(iter(given["loader"]))["lat"].shape == (32, 64)
            given["loader"].close()
    assert given["patches"].shape == (8, 2, 64, 64)
    normal = given["normalise"]({"t2m": torch.tensor(given["written"])}, None)["t2m"]
    assert float(normal.mean()) == pytest.approx(0, abs=1e-3)
    assert float(normal.std()) == pytest.approx(1, rel=1e-3)
    assert (given["now"].shape, given["then"].shape) == ((4, 64, 64),) * 2
    assert not given["now"].equal(given["then"])


@pytest.mark.multirank
def test_two_ranks_hold_the_tiles_of_each_sample(given, tmp_path):
    (tmp_path / "tiles.py").write_text(TILES)
    status, printed = run_job([*launch_command("mpiexec", 2), "tiles.py"], env=None, timeout_s=120)
    assert status == 0, printed
    lines = [line for line in printed.splitlines() if line.startswith("rank ")]
    assert sorted(lines) == TILES_PRINTED.splitlines()
