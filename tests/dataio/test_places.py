"""An error about a sample says where the source has it."""

import io

import numpy as np
import pytest
from PIL import Image as PillowImage

from dataio import CorruptRowError, FieldError, Image, Int, Staging, Text, WorkerError, Workers
from dataio.source.base import place_of
from dataio.world import single_world
from tests.dataio.loaders import make
from tests.dataio.source.shards import write_tar
from tests.memory_source import MemorySource

FIELDS = {"image": Image("png"), "label": Int("cls")}
BAD = 13
"""Its picture is cut off: its header is right."""


def png(i: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(i).integers(0, 256, (6, 5, 3), np.uint8)
    PillowImage.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()[:60] if i == BAD else buffer.getvalue()


@pytest.fixture
def shards(tmp_path):
    for shard in range(3):
        members = []
        for i in range(8 * shard, 8 * shard + 8):
            members += [(f"cat{i}.png", png(i)), (f"cat{i}.cls", b"3")]
        write_tar(tmp_path / f"t-{shard}.tar", members)
    return str(tmp_path / "t-{0..2}.tar")


@pytest.fixture
def folder(tmp_path):
    for i in range(24):
        path = tmp_path / "pets" / ("cat" if i < 12 else "dog") / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(i))
    return str(tmp_path / "pets")


WORKERS = [Workers(threads=0), Workers(threads=2), Workers(processes=1)]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_corrupt_picture_is_named_with_its_shard_and_key(tmp_path, shards, workers):
    options = {"source": shards, "workers": workers}
    fields = FIELDS | {"name": Text("__key__")}
    with make(single_world(), tmp_path / "c", fields=fields, **options) as loader:
        message = r"t-1\.tar, sample 5 of 8, key 'cat13': sample 13, field 'image': .*do not decode"
        with pytest.raises(FieldError, match=message):
            list(loader)
    with make(single_world(), tmp_path / "c", fields=FIELDS, **options) as loader:
        with pytest.raises(
            FieldError, match=r"t-1\.tar, sample 5 of 8, key 'cat13': sample 13, field"
        ):
            list(loader)
    skip = {"on_error": "skip", **options}
    with make(single_world(), tmp_path / "c", fields=FIELDS, **skip) as loader:
        ids = [i for batch in loader for i in batch["sample_id"].tolist() if i >= 0]
    assert sorted(ids) == [i for i in range(24) if i != BAD]


def test_a_corrupt_picture_of_a_folder_is_named_with_its_path(tmp_path, folder):
    fields = {"image": Image("image"), "label": Int("label")}
    with make(single_world(), tmp_path / "c", source=folder, fields=fields) as loader:
        with pytest.raises(FieldError, match=r"/pets/dog/013\.png: sample 13, field 'image'"):
            list(loader)


def fail(sample, rng):
    if sample["label"] == 3:
        raise ArithmeticError("three is too many")
    return sample


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_what_a_transform_raises_is_named_with_its_shard(tmp_path, shards, workers):
    fields = {"label": Int("cls")}
    with make(
        single_world(),
        tmp_path / "c",
        source=shards,
        fields=fields,
        transform=fail,
        workers=workers,
    ) as loader:
        message = r"t-\d\.tar, sample \d of 8: transform: sample \d+, epoch 0: raised Arithmetic"
        with pytest.raises(WorkerError, match=message):
            list(loader)


def fail_batch(batch, rng=None):
    raise ArithmeticError(f"{len(batch)} are too many")


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("name", ["collate", "batch_transform"])
def test_what_is_raised_of_a_batch_is_named_with_its_step_and_samples(
    tmp_path, shards, name, workers
):
    options = {"source": shards, "fields": {"label": Int("cls")}, "workers": workers}
    with make(single_world(), tmp_path / "c", **options) as loader:
        first = next(iter(loader))["sample_id"].tolist()
    named = ", ".join(rf"{i} \(.*t-{i // 8}\.tar, sample {i % 8} of 8\)" for i in first[:3])
    message = f"^{name}: epoch 0, step 0, samples {named} and 2 more: raised Arithmetic"
    with make(single_world(), tmp_path / "c", **options, **{name: fail_batch}) as loader:
        with pytest.raises(WorkerError, match=message) as raised:
            list(loader)
    assert isinstance(raised.value.__cause__, ArithmeticError)


def test_a_row_that_stays_corrupt_is_named_with_its_source(tmp_path, shards):
    fields = {"label": Int("cls")}
    with make(single_world(), tmp_path / "c", source=shards, fields=fields) as loader:
        cache = loader._session.pool.cache
        cache.entries.checksum.put(np.array([9]), np.array([1], np.uint64))
        loader._session.gather._verifier._repair = None
        with pytest.raises(CorruptRowError, match=r"^.*t-1\.tar, sample 1 of 8: .*sample 9"):
            list(loader)


def test_a_source_that_does_not_know_gives_its_name(tmp_path):
    assert place_of(MemorySource(3, name="mine"), 2) == "mine"


def shrink(sample):
    return {"image": sample["image"][::2].copy(), "label": sample["label"]}


def test_a_picture_that_does_not_decode_while_it_is_staged_is_named_too(tmp_path, shards):
    with pytest.raises(FieldError, match=r"t-1\.tar, sample 5 of 8: sample 13, field 'image'"):
        make(
            single_world(), tmp_path / "c", source=shards, fields=FIELDS,
            staging=Staging(transform=shrink),
        )  # fmt: skip
