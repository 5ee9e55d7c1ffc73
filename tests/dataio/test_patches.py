"""Random patches: places follow from seed, epoch and sample, and a batch reads only their bytes."""

import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shuffle
from dataio import (
    Array,
    ArrayFiles,
    Int,
    Loader,
    NodeCache,
    RandomPatch,
    Reports,
    Staging,
    Workers,
)
from dataio.batch.process_transform import WorkerProcesses, WorkerRows
from dataio.rows.patch import Patches
from dataio.world import run_threads, single_world, thread_worlds
from tests.cases import diagonal
from tonari.bench.storage.site.residency import evict, resident_bytes

NUM_SAMPLES, WHOLE = 22, (6, 9, 11)
PATCH = RandomPatch((3, 4, 5), num=2)
VOLUMES = np.arange(NUM_SAMPLES * 2 * 594, dtype=np.float32).reshape(NUM_SAMPLES, 2, *WHOLE)
SOURCE = {"volume": VOLUMES, "label": VOLUMES[:, 0].astype(np.int16), "i": np.arange(NUM_SAMPLES)}
FIELDS = {
    "volume": Array("volume", (2, *WHOLE), "float32", patch=PATCH),
    "label": Array("label", WHOLE, "int16", patch=PATCH),
    "i": Int("i"),
}


def open_loader(root: Path, *, world=None, source=SOURCE, fields=FIELDS, workers=None, **options):
    return Loader(
        source,
        fields=fields,
        batch_size=options.pop("batch_size", 4),
        cache=options.pop("cache", root),
        world=world or single_world(),
        shuffle=shuffle.Partial(0.3),
        seed=5,
        workers=workers or Workers(threads=0),
        reports=Reports(progress=False),
        **options,
    )


def taken(loader, epochs=2):
    """{(epoch, sample): its patches}, each as whole numbers that say where its values lay."""
    seen = {}
    for epoch in loader.epochs(epochs):
        for batch in loader:
            assert batch["volume"].shape == (len(batch["i"]), 2, 2, 3, 4, 5)
            for row in np.flatnonzero(batch["weight"]):
                patches = batch["volume"][row].numpy()
                assert np.array_equal(patches[:, 0].astype(np.int16), batch["label"][row])
                seen[epoch, int(batch["i"][row])] = patches.tobytes()
    return seen


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with open_loader(tmp_path_factory.mktemp("cache")) as loader:
        return taken(loader)


def test_patches_are_parts_of_their_sample_and_anew_in_each_epoch(expected):
    assert len(expected) == 2 * NUM_SAMPLES
    for (_, i), data in expected.items():
        for patch in np.frombuffer(data, np.float32).reshape(2, 2, 3, 4, 5):
            begin = np.argwhere(VOLUMES[i, 0] == patch[0, 0, 0, 0])[0]
            part = VOLUMES[(i, slice(None), *map(slice, begin, begin + PATCH.shape))]
            assert np.array_equal(part, patch)
    assert sum(expected[0, i] == expected[1, i] for i in range(NUM_SAMPLES)) <= 1


@diagonal(
    workers=[Workers(threads=1), Workers(threads=2), Workers(threads=2, prefetch=0)],
    beyond_memory=[False, True],
)
def test_threads_change_no_byte(tmp_path, monkeypatch, expected, workers, beyond_memory):
    monkeypatch.setattr("dataio.store.cache.exceeds_memory", lambda reader, **_: beyond_memory)
    with open_loader(tmp_path, workers=workers) as loader:
        assert taken(loader) == expected


@pytest.mark.parametrize("nodes", [[2], [1, 1]], ids=str)
def test_ranks_change_no_byte(tmp_path, expected, nodes):
    def rank(world):
        with open_loader(tmp_path / str(world.node), world=world, batch_size=3) as loader:
            return taken(loader)

    first, second = run_threads(thread_worlds(nodes), rank)
    assert first | second == expected


@pytest.mark.parametrize("beyond_memory", [False, True])
def test_processes_change_no_byte(tmp_path, monkeypatch, expected, beyond_memory):
    for module in ("store.cache", "batch.process_transform"):
        monkeypatch.setattr(f"dataio.{module}.exceeds_memory", lambda reader, **_: beyond_memory)

    def made_here(processes, pending):
        rows = WorkerRows(processes._arguments)
        return ((one, rows[one.work]) for one in pending)

    monkeypatch.setattr(WorkerProcesses, "make", made_here)
    with open_loader(tmp_path, workers=Workers(processes=1)) as loader:
        assert taken(loader) == expected


def test_a_resumed_run_delivers_what_it_would_have(tmp_path, expected):
    with open_loader(tmp_path / "cache") as loader:
        for _ in loader:
            if loader.step == 3:
                loader.save(tmp_path / "save")
                break
    with open_loader(tmp_path / "cache", batch_size=5) as loader:
        loader.restore(tmp_path / "save")
        seen = taken(loader)
    assert NUM_SAMPLES < len(seen) < 2 * NUM_SAMPLES
    assert seen.items() <= expected.items()


def test_all_places_are_equally_likely(tmp_path):
    shape, epochs = (5, 7), 40
    plane = np.tile(np.arange(35, dtype=np.int32).reshape(shape), (16, 1, 1))
    field = Array("x", shape, "int32", patch=RandomPatch((3, 3), num=64))
    counts: Counter[int] = Counter()
    with open_loader(tmp_path, source={"x": plane}, fields={"x": field}) as loader:
        for _ in loader.epochs(epochs):
            for batch in loader:
                counts.update(batch["x"][:, :, 0, 0].flatten().tolist())
    # 3 rows and 5 columns that a patch begins at
    assert sorted(counts) == [7 * row + column for row in range(3) for column in range(5)]
    drawn = epochs * 16 * 64
    off = np.array(list(counts.values())) - drawn / 15
    assert np.abs(off).max() < 5 * np.sqrt(drawn / 15 * 14 / 15)
    # 14 degrees of freedom: their chi-square is 14 on average, above 53 once in 500,000 times
    assert 0 < np.square(off).sum() / (drawn / 15) < 53


def test_a_cache_serves_patches_of_any_size(tmp_path):
    with open_loader(tmp_path) as loader:
        next(iter(loader))
    kept = sorted(tmp_path.iterdir())
    whole = {
        "volume": Array("volume", (2, *WHOLE), "float32"),
        "label": Array("label", WHOLE, "int16"),
    }
    for patch, shape in ((RandomPatch((4,)), (2, 6, 9, 4)), (None, (2, *WHOLE))):
        volume = Array("volume", (2, *WHOLE), "float32", patch=patch)
        with open_loader(tmp_path, fields=FIELDS | whole | {"volume": volume}) as loader:
            batch = next(iter(loader))
            assert sorted(tmp_path.iterdir()) == kept
        assert batch["volume"].shape == (4, *shape)
    assert np.array_equal(batch["volume"], VOLUMES[batch["i"]])


def volumes(directory: Path, shape, num: int = 2):
    """A loader's arguments for large volumes in files, of which patches of 1 MiB are read."""
    rng = np.random.default_rng(0)
    for number in range(num):
        np.save(directory / f"{number}.npy", rng.random(shape, np.float32))
    return ArrayFiles(str(directory / "*.npy"), axis=None)


def test_only_the_bytes_of_patches_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("dataio.store.cache.exceeds_memory", lambda reader, **_: True)
    shape, patch = (48, 48, 4096), (16, 16, 2048)
    field = Array("arr_0", shape, "float32", patch=RandomPatch(patch))
    options = {"source": volumes(tmp_path, shape), "fields": {"x": field}, "batch_size": 2}
    with open_loader(tmp_path / "cache", **options):
        pass
    (stored,) = (tmp_path / "cache").glob("*/node0/fixed-0.npy")
    evict([stored])
    if resident_bytes([stored]).bytes_resident != 0:
        pytest.skip("needs a file system whose pages can be dropped and counted")
    with open_loader(tmp_path / "cache", **options) as loader:
        batch = next(iter(loader))
    patches_bytes = batch["x"].nbytes
    assert patches_bytes == 2 * 4 * np.prod(patch)
    read = resident_bytes([stored]).bytes_resident
    assert read is not None
    assert patches_bytes < read < 1.5 * patches_bytes + (1 << 16)


@pytest.mark.parametrize("beyond_memory", [False, True])
def test_memory_is_that_of_patches(tmp_path, monkeypatch, beyond_memory):
    monkeypatch.setattr("dataio.store.cache.exceeds_memory", lambda reader, **_: beyond_memory)
    shape = (256, 256, 256)
    field = Array("arr_0", shape, "float32", patch=RandomPatch((32, 32, 32)))
    options = {"source": volumes(tmp_path, shape), "fields": {"x": field}, "batch_size": 2}
    with open_loader(tmp_path / "cache", **options):
        pass
    with open_loader(tmp_path / "cache", workers=Workers(threads=2), **options) as loader:
        tracemalloc.start()
        before = anonymous_bytes()
        seen = [anonymous_bytes() for _ in loader.epochs(6) for _ in loader]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(seen) == 6
    assert max(seen) - before < 12 << 20, "a volume has 64 MiB"
    assert 1 << 17 < peak < 4 << 20


def anonymous_bytes() -> int:
    """Bytes of this process that no file holds."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def test_extents_hold_the_patch_and_little_else():
    whole, patch = (3, 20, 4000), (4, 1500)
    part = Patches(whole, patch, np.array([[[5, 700], [16, 2500]]]))
    stored = np.arange(240_000, dtype=np.float64)
    read = np.zeros_like(stored)
    for start, num_bytes in part.extents(0, 8):
        read[start // 8 : (start + num_bytes) // 8] += 1
    wanted = np.zeros_like(stored).reshape(whole)
    wanted[:, 5:9, 700:2200] += 1
    wanted[:, 16:20, 2500:] += 1
    assert np.array_equal(read, wanted.ravel())
    near = list(Patches(whole, (4, 3600), np.array([[[5, 0]]])).extents(0, 8))
    assert near == [(8 * 4000 * (20 * c + 5), 8 * (3 * 4000 + 3600)) for c in range(3)]


@pytest.mark.parametrize("beyond_memory", [False, True])
def test_a_row_is_checked_only_where_it_is_asked_for(tmp_path, monkeypatch, caplog, beyond_memory):
    monkeypatch.setattr("dataio.store.cache.exceeds_memory", lambda reader, **_: beyond_memory)

    def delivered(cache):
        with open_loader(tmp_path, cache=cache) as loader:
            return {
                int(i): data.numpy().tobytes()
                for batch in loader
                for i, data in zip(batch["i"], batch["volume"], strict=True)
                if i >= 0
            }

    sound = delivered(tmp_path)
    (stored,) = tmp_path.glob("*/node0/fixed-0.npy")
    with open(stored, "r+b") as file:
        file.seek(-VOLUMES[0].nbytes, 2)
        file.write(b"\1" * VOLUMES[0].nbytes)
    damaged = delivered(tmp_path)
    assert sum(damaged[i] != sound[i] for i in sound) == 1
    always = NodeCache(tmp_path, verify="always")
    assert delivered(always) == sound, "read from the source again"
    assert "do not match their checksums" in caplog.text
    caplog.clear()
    assert delivered(always) == sound
    assert "do not match their checksums" not in caplog.text


@pytest.mark.parametrize("patch", [(7, 9, 11), (2, 2, 2, 2, 2)], ids=str)
def test_a_patch_that_does_not_fit_is_refused(patch):
    with pytest.raises(ValueError, match=r"patch is .*, must be no larger than the last axes"):
        Array("x", (2, *WHOLE), "float32", patch=RandomPatch(patch))


def test_a_stage_transform_and_an_evaluation_know_of_patches(tmp_path):
    def one_more(sample: Any) -> Any:
        return sample | {"volume": sample["volume"] + 1}

    staging = Staging(transform=one_more)
    with open_loader(tmp_path, staging=staging) as loader:
        batch = next(iter(loader))
        assert batch["volume"].shape == (4, 2, 2, 3, 4, 5)
        assert ((batch["volume"][:, :, 0] - 1).short() == batch["label"]).all()
        with pytest.raises(ValueError, match=r"field 'volume' of the loader draws .* or a patch"):
            loader.evaluation(SOURCE)


def test_a_patch_without_axes_is_refused():
    with pytest.raises(ValueError, match="must name an axis"):
        RandomPatch(())
