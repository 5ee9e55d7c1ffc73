"""Runs in which each rank has a tile of every sample: the rows and numbers of one process."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multirank import RunRanks
from tests.ranks.trainer.limited_train import LIMITS
from tests.trainer.digits import write_config
from tests.trainer.run.runs import KAKURENBO, lines
from tests.trainer.tiles.tiled_run import SETTINGS, make_data

pytestmark = pytest.mark.multirank
FIGURES = ("loss", "evaluation_loss", "evaluation_accuracy", "hidden_fraction", "lr", "order")


class Runs:
    """Writes settings, and compares what the runs say."""

    def __init__(self, root: Path) -> None:
        self.root = root
        np.savez(root / "data.npz", **make_data())

    def settings(
        self, name: str, model: str, tiles: Sequence[int] = (), *, rows: int = 8, then: str = "",
        directory: str = "",
    ) -> str:  # fmt: skip
        path = self.root / f"{name}.toml"
        path.write_text(
            SETTINGS.format(
                data=self.root / "data.npz", cache=self.root / f"cache_{name}", batch_size=rows,
                model=model, tiles=list(tiles), directory=self.root / (directory or name),
            )
        )  # fmt: skip
        return "|".join([str(path), *then.split()])

    def figures(self, name: str) -> list[dict[str, Any]]:
        return [
            {key: line[key] for key in FIGURES if line.get(key) is not None}
            for line in lines(self.root / name)
        ]


def test_tiles_train_the_rows_of_one_process_and_go_on_there(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    runs, hides = Runs(tmp_path), " ".join(KAKURENBO)
    run_ranks(
        "trainer/tiled_train", 1,
        runs.settings("unet", "unet"), runs.settings("classes", "classes", then=hides),
        runs.settings("staged", "staged", then="mesh.microbatches=2"),
    )  # fmt: skip
    run_ranks(
        "trainer/tiled_train", 4,
        runs.settings("unet_4", "unet", (2, 2)),
        runs.settings("classes_4", "classes", (2, 2), then=hides),
        runs.settings("unet_dp2", "unet", (1, 2), rows=4),
        runs.settings("staged_pp", "staged", (2, 1), then="mesh.pp=2 mesh.microbatches=2"),
        runs.settings("moved", "unet", (2, 1), rows=4, then="mesh.dp_shard=2 run.max_steps=8"),
    )  # fmt: skip
    for name in ("unet_4", "unet_dp2", "classes_4", "staged_pp"):
        base = runs.figures(name.split("_")[0])
        found = runs.figures(name)
        assert len(found) == len(base) > 15
        for one, other in zip(base, found, strict=True):
            assert other == pytest.approx(one, rel=1e-9, abs=1e-9), name
    # Amid the second epoch, from four ranks to one
    run_ranks("trainer/tiled_train", 1, runs.settings("on_one", "unet", directory="moved"))
    base, found = runs.figures("unet"), runs.figures("moved")
    for one, other in zip(base[-10:], found[-10:], strict=True):
        assert other == pytest.approx(one, rel=1e-9, abs=1e-9)


VIT = (
    "data.image_size=8", "model.kind=vit", "model.patch=2", "model.width=8", "model.depth=2",
    "model.heads=2", "model.pooling=token", "mesh.dtype=float64", "optimizer.momentum=0.9",
    "optimizer.schedule=steps",
)  # fmt: skip


def test_a_vision_transformer_goes_on_on_fewer_tiles_and_on_one(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    settings = write_config(tmp_path)

    def train(ranks: int, name: str, *overrides: str) -> list[float]:
        paths = (f"run.directory={tmp_path / name}", f"data.cache.path={tmp_path / 'cache'}")
        run_ranks("trainer/tiled_train", ranks, "|".join([str(settings), *VIT, *paths, *overrides]))
        return [line["loss"] for line in lines(tmp_path / name) if line["kind"] == "step"]

    base = train(1, "whole")
    train(4, "moved", "mesh.tiles=[2]", "mesh.pp=2", "mesh.microbatches=4", "run.max_steps=5")
    train(4, "moved", "mesh.tiles=[4]", "run.max_steps=9", "mesh.checkpointing=full")
    train(2, "moved", "mesh.tiles=[1, 2]", "run.max_steps=12", "mesh.checkpointing=selective")
    assert train(1, "moved") == pytest.approx(base, rel=1e-9)
    assert len(base) > 20


def test_a_rank_reads_keeps_and_exchanges_its_tile_alone(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    """Two nodes, of a rank with whole samples each, and of two ranks that share each sample."""
    zarr = pytest.importorskip("zarr", minversion="3", reason="needs Python 3.11: tonari[zarr]")
    group = zarr.open_group(tmp_path / "data.zarr", mode="w")
    for name, values in make_data((96, 64)).items():
        chunks = (1, *values.shape[1:2], 48, 64)[: values.ndim]
        group.create_array(name, data=values, chunks=chunks)
    runs, found = Runs(tmp_path), []
    for name, tiles in (("whole", ()), ("tiles", (2, 1))):
        ranks, data = 4 if tiles else 2, tmp_path / "data.zarr"
        then = f"data.train={data} data.test={data} recipe.args.sizes=[96,64] run.epochs=2"
        then += f" run.prometheus={tmp_path / name}.prom"
        run_ranks(
            "trainer/tiled_train", ranks, runs.settings(name, "classes", tiles, rows=4, then=then),
            env={"TONARI_RANKS_PER_NODE": str(ranks // 2)},
        )  # fmt: skip
        texts = [(tmp_path / f"{name}-{rank}.prom").read_text() for rank in range(ranks)]
        kept = [file.stat().st_size for file in tmp_path.glob(f"cache_{name}/*/node*/fixed*")]
        counted = [
            max(
                float(re.findall(rf"loader_{each}_bytes_total{{.*}} (.*)", its)[0]) for its in texts
            )
            for each in ("source", "disk_written", "exchanged")
        ]
        found.append([*counted, sum(kept) / ranks])
    for whole, of_tiles in zip(*found, strict=True):
        assert 0 < of_tiles < 1.1 / 2 * whole


@pytest.fixture
def cgroup() -> Iterator[str]:
    """What cgroups of memory are called, but for a number; they are removed behind the test."""
    for root in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        tried = root / f"tonari-{os.getpid()}-"
        try:
            tried.mkdir()
        except OSError:
            continue
        is_limited = any((tried / name).exists() for name in LIMITS)
        tried.rmdir()
        if is_limited:
            yield str(tried)
            for made in root.glob(f"{tried.name}*"):
                made.rmdir()
            return
    pytest.skip("needs to make cgroups of memory, as root may")


@pytest.mark.nightly
def test_a_sample_that_one_rank_cannot_hold_trains_on_four(
    run_ranks: RunRanks, tmp_path: Path, cgroup: str
) -> None:
    runs, sizes = Runs(tmp_path), (768, 512)
    np.savez(tmp_path / "big.npz", **make_data(sizes, num_samples=2))
    then = f"data.train={tmp_path}/big.npz data.test= recipe.args.sizes=[768,512] run.epochs=2"
    # malloc returns what is freed: a limit counts what it keeps, too.
    env = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    ended = [
        run_ranks(
            "trainer/limited_train", ranks,
            runs.settings(f"on_{ranks}", "unet", tiles, rows=1, then=then), str(256 << 20),
            f"{cgroup}{ranks}-", check=ranks == 4, env=env, fresh=True,
        )
        for ranks, tiles in ((1, ()), (4, (4, 1)))
    ]  # fmt: skip
    alone, four = ended
    assert "signal 9" in alone.output.lower()
    first, last = four.reports[0]["losses"]
    assert last < first
