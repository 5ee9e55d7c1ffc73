"""Samples on several ranks: each loads its tile, all of them the same rows in the same steps."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import importance
import shuffle
from dataio import (
    Array,
    ArrayFiles,
    Int,
    Loader,
    NodeCache,
    Reports,
    Shards,
    Staging,
    Tiles,
    Workers,
    WorldError,
)
from dataio.base.errors import DataioError
from dataio.mixture import Mixture
from dataio.rowlog.reading import read_log
from dataio.store.files.fetch import Fetcher
from dataio.store.files.reader import MEMORY_FRACTION
from dataio.world import World, run_threads, single_world, thread_worlds

NUM_SAMPLES, SHAPE = 24, (10, 8)
VALUES = np.arange(NUM_SAMPLES * 80, dtype=np.float32).reshape(NUM_SAMPLES, *SHAPE)
"""Each number once, so that a tile says where it comes from."""
SOURCE: dict[str, Any] = {"x": VALUES, "y": np.arange(NUM_SAMPLES)}
HIDES = importance.Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0)


def fields_of(tiles: Tiles | None) -> dict[str, Any]:
    return {"x": Array("x", SHAPE, "float32", tiles), "y": Int("y")}


def make(
    world: World, root: Path, tiles: Tiles | None, source: Any = SOURCE, **options: Any
) -> Loader:
    chosen: dict[str, Any] = {"batch_size": 3, "seed": 5, "shuffle": shuffle.Partial(0.4)}
    chosen |= {"workers": Workers(threads=0), "reports": Reports(progress=False)}
    chosen |= {"fields": fields_of(tiles), "cache": root}
    return Loader(source, world=world, **(chosen | options))


def outcome_of(batch: Any, tile: int = 0) -> tuple[torch.Tensor, ...]:
    """Losses that differ from row to row, of rows that are predicted right."""
    loss = batch["y"].float().sin() + 2 + tile
    return loss, torch.ones(len(loss), dtype=torch.bool), torch.ones(len(loss))


def tiles_in(loader: Loader) -> Any:
    (tiles,) = (field.tiles for field in loader.fields.values() if isinstance(field, Array))
    return tiles


def checked(loader: Loader, batch: Any) -> list[int]:
    """See that a batch holds its samples' tiles; return the samples."""
    tiles = tiles_in(loader)
    box = (slice(None),) if tiles is None else (slice(None), *tiles.box(SHAPE))
    valid = batch["slot"] >= 0
    ids = batch["sample_id"][valid].numpy()
    np.testing.assert_array_equal(batch["x"][valid].numpy(), VALUES[ids][box])
    assert batch["y"][valid].tolist() == ids.tolist()
    return [*map(int, ids)]


def train(loader: Loader, num_epochs: int, *, stop: int | None = None) -> list[list[list[int]]]:
    """Train epochs with reports: the samples of each step. ``stop``: break off there in epoch 1."""
    steps: list[list[list[int]]] = []
    for epoch in loader.epochs(num_epochs):
        steps.append([])
        for batch in loader:
            steps[-1].append(checked(loader, batch))
            loader.report(batch, *outcome_of(batch))
            if epoch == 1 and loader.step == stop:
                return steps
        for batch in loader.refresh():
            loader.report(batch, *outcome_of(batch))
    return steps


@pytest.mark.parametrize(
    ("nodes", "tiles"),
    [
        ((4,), Tiles((-2, -1), (2, 2), 1)),
        ((4, 4), Tiles((0, 1), (2, 2), 2)),
        ((2, 2, 2), Tiles((0,), (3,))),
        ((3, 3), Tiles((0,), (3,), 3)),
        ((2, 2), Tiles((1,), (4,), 1)),
    ],
)
@pytest.mark.parametrize("policy", [None, HIDES])
def test_each_tile_of_each_sample_once_an_epoch_in_the_same_steps(
    tmp_path, nodes, tiles, policy
) -> None:
    """With rows that move between nodes, and rows that are hidden."""

    def run(world: World) -> Any:
        with make(world, tmp_path, tiles, importance=policy) as loader:
            assert bool(loader.lost_with_ranks) == (policy is not None)
            return train(loader, 3), tiles_in(loader).index, loader.stats()

    found = run_threads(thread_worlds(nodes), run)
    num_tiles = tiles.num_tiles
    assert [index for _, index, _ in found] == [rank % num_tiles for rank in range(len(found))]
    for first in range(0, len(found), num_tiles):
        assert all(found[first][0] == steps for steps, *_ in found[first : first + num_tiles])
    for epoch in range(3):
        shown = sorted(i for steps, *_ in found[::num_tiles] for ids in steps[epoch] for i in ids)
        assert len(set(shown)) == len(shown)
        assert policy is not None or shown == [*range(NUM_SAMPLES)]
        assert policy is None or epoch == 0 or len(shown) < NUM_SAMPLES
    moved = sum(stats["exchanged_rows"] for *_, stats in found)
    assert (moved > 0) == (len(found) > num_tiles and len(nodes) > 1)


def test_the_tiles_of_a_sample_lie_in_caches_of_their_own(tmp_path) -> None:
    """A start with another halo stages anew; a start with the same reads nothing."""

    np.save(tmp_path / "x.npy", VALUES)

    def run(world: World, halo: int) -> float:
        source = {"x": tmp_path / "x.npy", "y": SOURCE["y"]}
        with make(world, tmp_path / "cache", Tiles((0,), (2,), halo), source) as loader:
            train(loader, 1)
            return loader.stats()["staged_rows"]

    staged = [run_threads(thread_worlds([2]), partial(run, halo=halo)) for halo in (0, 1, 1, 0)]
    assert [sum(ranks) for ranks in staged] == [2 * NUM_SAMPLES, 2 * NUM_SAMPLES, 0, 0]


def test_tiles_whose_halos_hold_all_are_staged_beside_training(tmp_path) -> None:
    def run(world: World) -> Any:
        staging = Staging(when="overlap")
        with make(world, tmp_path, Tiles((0,), (2,), 5), staging=staging) as loader:
            return train(loader, 1)

    first, second = run_threads(thread_worlds([2], timeout_s=3), run)
    assert first == second


def test_of_other_sources_whole_samples_are_read_and_cut(tmp_path, caplog) -> None:
    table = pa.table({"x": list(VALUES.reshape(NUM_SAMPLES, -1)), "y": SOURCE["y"]})
    pq.write_table(table, tmp_path / "a.parquet")
    names = [str(tmp_path / "a.parquet")]

    def run(world: World) -> Any:
        with make(world, tmp_path / "cache", Tiles((1,), (2,), 1), names) as loader:
            return train(loader, 1)

    first, second = run_threads(thread_worlds([2]), run)
    assert first == second


STARTS = {
    "2 x 2": ([4], Tiles((0, 1), (2, 2), 1)),
    "1 x 2": ([2], Tiles((0, 1), (1, 2))),
    "whole": ([1], None),
    "2 nodes": ([2, 2], Tiles((0,), (4,), 2)),
}


@pytest.mark.parametrize("policy", [None, HIDES])
def test_a_run_goes_on_with_other_tiles_and_with_none(tmp_path, policy) -> None:
    """From the middle of an epoch: each step has the same samples as in one go."""

    def run(world: World, tiles: Tiles | None, name: str, saved: str, *, stop: int | None) -> Any:
        with make(world, tmp_path / name, tiles, importance=policy) as loader:
            if saved:
                loader.restore(tmp_path / saved)
            steps = train(loader, 4, stop=stop)
            if stop is not None:
                loader.save(tmp_path / name / "save")
            return steps

    def start(name: str, saved: str = "", stop: int | None = None) -> Any:
        nodes, tiles = STARTS[name]
        work = partial(run, tiles=tiles, name=name, saved=saved, stop=stop)
        found = run_threads(thread_worlds(nodes), work)
        assert all(steps == found[0] for steps in found)
        return found[0]

    whole = start("whole")
    for name in ("2 x 2", "2 nodes"):
        begun = start(name, stop=2)
        assert begun == [whole[0], whole[1][:2]]
        for other in STARTS:
            rest = start(other, saved=f"{name}/save")
            assert rest == [whole[1][2:], *whole[2:]]


def test_two_replicas_of_tiles_go_on_as_two_of_whole_samples(tmp_path) -> None:
    def run(world: World, tiles: Tiles | None, *, stop: int | None) -> Any:
        with make(world, tmp_path / f"{tiles}", tiles) as loader:
            if stop is None:
                loader.restore(tmp_path / "save")
            steps = train(loader, 2, stop=stop)
            if stop is not None:
                loader.save(tmp_path / "save")
            return steps

    begun = run_threads(thread_worlds([4]), lambda w: run(w, Tiles((0,), (2,)), stop=1))
    rest = run_threads(thread_worlds([2]), lambda w: run(w, None, stop=None))
    assert (begun[0], begun[2]) == (begun[1], begun[3])
    epoch = [*begun[0][1], *begun[2][1], *rest[0][0], *rest[1][0]]
    assert sorted(i for ids in epoch for i in ids) == [*range(NUM_SAMPLES)]


def test_losses_that_differ_between_the_tiles_of_a_sample_end_the_job(tmp_path) -> None:
    def run(world: World) -> None:
        with make(world, tmp_path, Tiles((0,), (2,)), importance=HIDES) as loader:
            for _ in loader.epochs(2):
                for batch in loader:
                    loader.report(batch, *outcome_of(batch, tile=world.rank))

    found = r"epoch 1: rank 1, which holds tile 1, has other (scores|rows to train) than rank 0"
    with pytest.raises(WorldError, match=found):
        run_threads(thread_worlds([2]), run)


def test_tiles_of_a_node_share_the_memory_that_is_for_batches_ahead(tmp_path, monkeypatch) -> None:
    asked, fetch = Counter[int](), Fetcher.fetch

    def counted(*args: Any) -> Any:
        asked[get_ident()] += 1
        return fetch(*args)

    def run(world: World) -> int:
        with make(world, tmp_path, Tiles((0,), (2,))) as loader:
            next(iter(loader))
            return asked[get_ident()]

    monkeypatch.setattr(Fetcher, "fetch", counted)
    monkeypatch.setattr("dataio.store.cache.exceeds_memory", lambda reader, **_: True)
    batch_bytes = 3 * (5 * 8 * 4 + 8)
    # Of 5 % of it each rank may take 2.5 batches
    monkeypatch.setattr("dataio.batch.lookup.memory_limit", lambda: 20 * 2 * 2.5 * batch_bytes)
    assert run_threads(thread_worlds([2]), run) == [3, 3]


@pytest.mark.parametrize(("caches", "fetched"), [(1.5, 1), (2.5, 0)])
def test_memory_holds_the_caches_of_all_tiles_or_rows_are_fetched(
    tmp_path, monkeypatch, caches: float, fetched: int
) -> None:
    def run(world: World) -> bool:
        with make(world, tmp_path, Tiles((0,), (2,))) as loader:
            next(iter(loader))
            return loader._session.pool.cache._fetcher is not None

    one = len(VALUES) * (5 * 8 * 4 + 8)
    monkeypatch.setattr(
        "dataio.store.files.reader.memory_limit", lambda: caches * one / MEMORY_FRACTION
    )
    assert run_threads(thread_worlds([2]), run) == [fetched] * 2


def test_what_a_transform_draws_is_the_same_on_all_tiles_of_a_sample(tmp_path) -> None:
    """So noise that is drawn for the whole, and cut, is that of the whole."""

    def run(world: World, tiles: Tiles | None) -> dict[int, np.ndarray]:
        def noise(sample: Any, rng: np.random.Generator) -> Any:
            whole, own = rng.standard_normal(SHAPE, np.float32), tiles_in(loader)
            return sample | {"x": whole[own.box(SHAPE)] if own else whole}

        with make(world, tmp_path, tiles, transform=noise) as loader:
            found: dict[int, np.ndarray] = {}
            for batch in loader:
                ids = batch["sample_id"].tolist()
                found |= zip(ids, batch["x"].numpy().copy(), strict=True)
            return found

    tiles = Tiles((1,), (2,), 1)
    whole = run(single_world(), None)
    for index, found in enumerate(run_threads(thread_worlds([2]), lambda w: run(w, tiles))):
        box = replace(tiles, index=index).box(SHAPE)
        assert found.keys() == whole.keys()
        assert all((noise == whole[sample_id][box]).all() for sample_id, noise in found.items())


def test_one_tile_writes_the_reports_and_each_replays_its_own(tmp_path) -> None:
    reports = Reports(progress=False, metrics=tmp_path / "m.jsonl", rows=tmp_path / "rows")

    def run(world: World) -> None:
        with make(world, tmp_path / "c", Tiles((0,), (2,)), reports=reports) as loader:
            for _ in loader.epochs(2):
                kept = [(batch["sample_id"].tolist(), batch["x"]) for batch in loader]
            world.barrier(doing="let the log be written")
            again = loader.replay(1, 3)
            assert again["sample_id"].tolist() == kept[3][0]
            assert again["x"].equal(kept[3][1])

    run_threads(thread_worlds([2]), run)
    logged = (tmp_path / "rows/log.jsonl").read_text()
    assert logged.count('"attempt"') == len(read_log(tmp_path / "rows").attempts) == 2
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1]


def test_an_evaluation_and_a_mixture_have_tiles_too(tmp_path) -> None:
    tiles = Tiles((0,), (2,), 1)

    def run(world: World) -> Any:
        made = {name: make(world, tmp_path / name, tiles) for name in ("a", "b")}
        with Mixture(made, {"a": 1, "b": 1}, steps=20) as mixture:
            steps = [checked(made[str(batch["dataset"])], batch) for batch in mixture]
            mixture.save(tmp_path / "save")
            mixture.restore(tmp_path / "save")
            few: dict[str, np.ndarray] = {"x": VALUES[:7], "y": np.arange(7)}
            evaluation = made["a"].evaluation(few)
            return steps, [checked(made["a"], batch) for batch in evaluation]

    first, second, *others = run_threads(thread_worlds([2, 2]), run)
    assert [first, *others[:1]] == [second, *others[1:]]
    assert sorted(i for _, passed in (first, others[0]) for ids in passed for i in ids) == [
        *range(7)
    ]


@pytest.mark.parametrize(("tiles", "own"), [(None, "none"), (Tiles((0,), (2,)), "2")])
def test_an_evaluation_is_cut_into_the_tiles_of_its_loader(tmp_path, tiles, own) -> None:
    def run(world: World) -> None:
        with make(world, tmp_path, tiles) as loader:
            loader.evaluation(SOURCE, fields=fields_of(Tiles((0, 1), (2, 2))))

    found = f"field 'x' is cut into 4 tiles, and those of the loader into {own}"
    with pytest.raises(ValueError, match=found):
        run_threads(thread_worlds([2]), run)


def test_a_rank_may_say_itself_which_tile_it_holds(tmp_path, monkeypatch) -> None:
    """Among the ranks of all tiles, or in a world of those of its tile alone."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))

    def run(world: World) -> Any:
        tiles = Tiles((0,), (2,), 0, world.rank // 2)
        with make(world, tmp_path, tiles) as loader:
            found = train(loader, 2)
        (own,) = world.parts.values()
        with make(own, tmp_path, tiles, workers=Workers()) as loader:
            assert loader._session.arguments.workers.threads == 2, "of 8 cores"
            assert tiles_in(loader) == tiles
            assert train(loader, 2) == found
        return found

    first, second, *others = run_threads(thread_worlds([2, 2]), run)
    assert others == [first, second]
    assert first != second


def test_a_world_has_samples_in_one_number_of_tiles(tmp_path) -> None:
    def run(world: World) -> None:
        for tiles in (Tiles((0,), (2,)), Tiles((0,), (4,))):
            with make(world, tmp_path, tiles) as loader:
                train(loader, 1)

    with pytest.raises(WorldError, match=r"holds a tile with the ranks \(\d,\), and had the part"):
        run_threads(thread_worlds([4]), run)


def test_ranks_of_a_sample_are_given_the_same_arguments(tmp_path) -> None:
    def run(world: World, tiles: Tiles | None, seed: int = 5) -> None:
        make(world, tmp_path, tiles, seed=seed).close()

    for different, found in (
        (lambda world: run(world, Tiles((0,), (2,)), world.rank), "with seed 1, rank 0 with 0"),
        (lambda world: run(world, Tiles((0,), (2,)) if world.rank else None), "with tiles {'x'"),
        (lambda world: run(world, None if world.rank else Tiles((0,), (2,))), "with tiles None"),
        (lambda world: run(world, Tiles((0,), (2,), world.rank)), "with tiles .*halo=1"),
    ):
        with pytest.raises(WorldError, match=f"Loader: rank 1 was made {found}"):
            run_threads(thread_worlds([2]), different)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([3], {}, "samples are cut into 2 tiles, and there are 3 ranks, expected a multiple of 2"),
    ([1, 3], {}, r"ranks \[0, 2\] of tile 0 are on the nodes \[0, 1\], and the ranks \[1, 3\] of"),
    ([2], {"cache": "1MB"}, "tiles and a quota exclude one another"),
    ([2], {"on_error": "skip"}, 'tiles and on_error="skip" exclude one another'),
    ([2], {"staging": Staging(transform=dict)}, "tiles and Staging"),
    ([2], {"source": Shards("a-*.tar", grows=True)}, r"tiles and Shards\(grows=True\) exclude"),
    ([2], {"importance": importance.CostAware(0.5)}, "because costs are measured on each rank"),
    ([2], {"fields": fields_of(Tiles(("lat",), (2,)))}, "'lat' is a name, expected a position"),
    (
        [4],
        {"fields": {str(n): Array("x", SHAPE, "float32", Tiles((0,), (n,))) for n in (2, 4)}},
        "are cut into different numbers of tiles",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "options", "found"), REFUSED)
def test_what_tiles_do_not_go_with_is_refused_before_anything_is_staged(
    tmp_path, nodes, options, found
) -> None:
    if "cache" in options:
        options = {"cache": NodeCache(tmp_path / "c", quota=options["cache"])}

    def run(world: World) -> None:
        make(world, tmp_path / "c", Tiles((0,), (2,)), **options).close()

    with pytest.raises((ValueError, DataioError), match=found):
        run_threads(thread_worlds(nodes), run)
    assert not [*(tmp_path / "c").rglob("*")]


@pytest.mark.usefixtures("zarr_reader")
def test_axes_have_the_names_of_array_files_and_chunks_that_lack_are_fill_values(
    tmp_path,
) -> None:
    zarr = pytest.importorskip("zarr", minversion="3", reason="needs Python 3.11: tonari[zarr]")
    values = VALUES.copy()
    values[2, 0, 0] = np.nan
    values[3, 5:, 4:] = -1
    dims = ("time", "lat", "lon")
    array = zarr.open_group(tmp_path / "a.zarr", mode="w").create_array(
        "x", data=values, chunks=(1, 5, 4), dimension_names=dims, fill_value=-1
    )
    array[4, 5:, 4:] = 0
    (tmp_path / "a.zarr/x/c/4/1/1").unlink()
    values[4, 5:, 4:] = -1

    def run(world: World, axes: Any = ("lat", "lon")) -> Any:
        field = Array("x", SHAPE, "float32", Tiles(axes, (2, 2), 1))
        source = ArrayFiles(tmp_path / "a.zarr", axis="time")
        with make(world, tmp_path / "c", None, source, fields={"x": field}) as loader:
            tiles = tiles_in(loader)
            assert tiles == Tiles((0, 1), (2, 2), 1, world.rank)
            for batch in loader:
                expected = values[batch["sample_id"].numpy()][(slice(None), *tiles.box(SHAPE))]
                np.testing.assert_array_equal(batch["x"].numpy(), expected)

    run_threads(thread_worlds([4]), run)
    with pytest.raises(ValueError, match=r"field 'x': tiles have the axis 'height', and a sample"):
        run_threads(thread_worlds([4]), lambda world: run(world, ("lat", "height")))


@pytest.mark.multirank
@pytest.mark.thorough
def test_a_job_of_tiles_that_is_killed_goes_on_from_its_save(tmp_path, run_ranks) -> None:
    """Two tiles on two nodes of two ranks each, of which one is killed."""

    def start(directory: Path, killed: str = "", *, check: bool = True) -> Any:
        if not directory.exists():
            directory.mkdir()
            np.save(directory / "x.npy", VALUES)
        env = {"TONARI_RANKS_PER_NODE": "2"}
        return run_ranks("tiles_job", 4, str(directory), killed, env=env, check=check)

    whole = start(tmp_path / "whole").reports
    assert start(tmp_path / "killed", "killed", check=False).returncode
    rest = start(tmp_path / "killed").reports
    for rank in range(4):
        assert rest[rank] == [step for step in whole[rank] if tuple(step[:2]) > (2, 2)]
        assert [step[:3] for step in whole[rank]] == [step[:3] for step in whole[rank ^ 1]]
        assert whole[rank] != whole[rank ^ 1], "each has its own tile"
