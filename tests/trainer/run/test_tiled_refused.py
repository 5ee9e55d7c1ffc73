"""What does not go with tiles is refused by one message, before data is read."""

from pathlib import Path

import numpy as np
import pytest
import torch

import dataio
from benchmarks.studies.tiles import played
from tests.trainer.digits import write_config
from tests.trainer.tiles.tiled_run import SETTINGS, Regress, make_data
from tonari.rows.settings import find_fields
from tonari.trainer.config.config import load_config
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.build import lay_out
from tonari.trainer.run.loop import train
from tonari.trainer.run.own import own_of
from tonari.trainer.run.tiled import TiledTask, are_tiled, of_tile, sample_shape
from tonari.trainer.run.verify.checking import mesh_words, short_run
from tonari.trainer.tiles import Grid


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mesh.cp=2"], "expected one of them"),
        (["mesh.tp=2"], "mesh.tp 2, mesh.compile false"),
        (["mesh.pp=2", "mesh.schedule=zbv"], 'mesh.schedule "zbv", expected'),
        (["data.kind=text", "model.kind=gpt"], "text has no tiles"),
    ],
)
def test_settings_that_do_not_go_with_tiles(tmp_path: Path, overrides: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        train(load_config(write_config(tmp_path), ["mesh.tiles=[2, 1]", *overrides]), quiet=True)


@pytest.mark.parametrize(
    "tiles", [None, dataio.Tiles((1, 2), (1, 2)), dataio.Tiles((1, 2), (2, 1), halo=1)]
)
def test_fields_are_cut_as_the_mesh_or_not_at_all(tmp_path: Path, tiles: dataio.Tiles | None):
    config = load_config(write_config(tmp_path), ["mesh.tiles=[2, 1]"])
    fields = {"now": dataio.Array("now", (2, 8, 8), "float32", tiles=tiles)}
    if tiles is None:
        assert not are_tiled(config, fields)
        return
    with pytest.raises(ConfigError, match=r"'now' has the tiles .* mesh.tiles is \[2, 1\]"):
        are_tiled(config, fields)


@pytest.mark.parametrize("axes", [(2, 1), (1, 3), ("lat", "lon")], ids=str)
def test_axes_lie_as_those_of_the_mesh(tmp_path: Path, axes: tuple[int | str, ...]):
    config = load_config(write_config(tmp_path), ["mesh.tiles=[2, 2]"])
    fields = {"now": dataio.Array("now", (2, 8, 8, 8), "float32", dataio.Tiles(axes, (2, 2)))}
    with pytest.raises(ConfigError, match="expected positions that follow one another"):
        are_tiled(config, fields)


def test_a_rank_reads_its_tile(tmp_path: Path):
    config = load_config(write_config(tmp_path), ["mesh.tiles=[2, 1]"])
    tiles = dataio.Tiles((1, 2), (2, 1))
    fields: dict[str, dataio.Field] = {
        "now": dataio.Array("now", (2, 9, 8), "float32", tiles=tiles), "y": dataio.Int("y"),
    }  # fmt: skip
    assert are_tiled(config, fields)
    column = of_tile(fields, 1)["now"].column("now")
    assert column is not None
    assert column.shape == (2, 4, 8)
    assert sample_shape(config, Regress(), fields) == (2, 9, 8)
    with pytest.raises(ConfigError, match="expected one field of the shape"):
        sample_shape(config, Regress(), {"now": dataio.Array("now", (9,), "float32")})


def test_ranks_that_are_too_few_are_those_of_tiles(tmp_path: Path):
    config = load_config(write_config(tmp_path), ["mesh.tiles=[2, 3]"])
    with pytest.raises(ConfigError, match="tiles 6 x tp 1 is 6 ranks, but the job has 4"):
        lay_out(config, 4)


def test_a_field_is_cut_along_its_spatial_axes_whatever_their_sizes():
    def task(axes: tuple[int, int], shape: tuple[int, ...]) -> TiledTask:
        with played(4, 3) as group:
            grid = Grid((2, 2), group)
        tiles = dataio.Tiles(axes, (2, 2))
        return TiledTask(
            Regress(), grid, (2, 9, 8), {"then": dataio.Array("then", shape, "float32", tiles)}
        )

    with pytest.raises(ConfigError, match=r"'then' is cut along the last 3 axes, expected the las"):
        task((0, 1), (4, 9, 8))
    finer = task((-2, -1), (1, 18, 16)).target({"then": torch.zeros(5, 1, 9, 8)})
    assert finer.shape == (5, 1, 18, 16)


def test_one_process_that_reads_what_a_run_reads_has_whole_samples(tmp_path: Path):
    """Such as `tonari rows --replay` and `tonari verify`."""
    np.savez(tmp_path / "data.npz", **make_data())
    settings = SETTINGS.format(
        data=tmp_path / "data.npz", cache=tmp_path, batch_size=8, model="unet", tiles=[2, 2],
        directory=tmp_path,
    )  # fmt: skip
    (tmp_path / "run.toml").write_text(settings)
    config = load_config(tmp_path / "run.toml")
    assert mesh_words(config) == "tiles=[2, 2]"
    _, own = short_run(config, own_of(config), tmp_path, 0)
    for fields in (own.fields, own.evaluation_fields, find_fields(config, tmp_path)):
        assert fields is not None
        assert {getattr(field, "tiles", None) for field in fields.values()} == {None}
