"""docs/grids.md: its blocks run on a file as they describe it, and give what they say."""

import shlex

import h5py
import numpy as np
import pytest

from tests.docs.blocks import blocks_of
from tests.multirank import ROOT
from tonari import cli

BLOCKS = blocks_of(ROOT / "docs/grids.md")
EXAMPLE, PATCHES, STATISTICS, PAIRS = (b.text for b in BLOCKS if b.language == "python")
COMMAND, *PRINTED = (b.text for b in BLOCKS if b.language in ("bash", "text"))
SIZES = {"time": 48, "lat": 128, "lon": 256}


@pytest.fixture
def given(tmp_path, monkeypatch):
    """A file of weather where the first block looks for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "cache"))
    (tmp_path / "era5").mkdir()
    values = np.random.default_rng(0).normal(280, 5, tuple(SIZES.values())).astype(np.float32)
    with h5py.File("era5/1.nc", "w") as file:
        for name, size in SIZES.items():
            kind = np.int64 if name == "time" else np.float32
            file.create_dataset(name, data=np.arange(size, dtype=kind)).make_scale(name)
        file["t2m"], file["land"] = values, np.ones(values.shape[1:], np.int8)
        for name, dims in (("t2m", list(SIZES)), ("land", list(SIZES)[1:])):
            for dim, scale in zip(file[name].dims, dims, strict=True):
                dim.attach_scale(file[scale])
    return {"files": "era5/*.nc", "written": values}


def test_the_command_prints_what_the_page_shows(given, capsys):
    assert cli.main(shlex.split(COMMAND)[1:]) == 0
    assert capsys.readouterr().out == PRINTED[0]


def test_the_recipes_give_tiles_patches_statistics_and_pairs(given):
    for block in (EXAMPLE, PATCHES, STATISTICS, PAIRS):
        exec(compile(block, "docs/grids.md", "exec"), given)
        if block is EXAMPLE:
            assert next(iter(given["loader"]))["lat"].shape == (32, 64)
            given["loader"].close()
    assert given["patches"].shape == (8, 64, 64)
    assert float(given["mean"]) == pytest.approx(given["written"].mean(dtype=float))
    assert float(given["std"]) == pytest.approx(given["written"].std(dtype=float), rel=1e-5)
    assert (given["now"].shape, given["then"].shape) == ((4, 64, 64),) * 2
    assert not given["now"].equal(given["then"])
