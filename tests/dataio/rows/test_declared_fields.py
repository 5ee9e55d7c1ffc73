"""A cache is known by the whole declaration of its fields, as far as it decides what is stored."""

import io
import json

import numpy as np
import pytest
from PIL import Image as Picture

from dataio import Bytes, Float, Image, Int, Loader, Reports, Resize, Staging, Text, Tokens, Workers
from dataio.base.errors import FieldError
from dataio.world import single_world
from tests.dataio.source.shards import write_tar
from tonari import cli

SAMPLES = 6


def png(shade):
    file = io.BytesIO()
    Picture.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(file, "PNG")
    return file.getvalue()


def npy(numbers):
    file = io.BytesIO()
    np.save(file, numbers)
    return file.getvalue()


@pytest.fixture
def shard(tmp_path):
    """Samples with two members for every kind of field, whose values differ."""
    members = []
    for i in range(SAMPLES):
        members += [
            (f"{i:03}.a", b"%d" % i),
            (f"{i:03}.b", b"%d" % (100 + i)),
            (f"{i:03}.png", png(i)),
            (f"{i:03}.seg.png", png(100 + i)),
            (f"{i:03}.tok", npy(np.arange(4 * i, 4 * i + 4))),
        ]
    return str(write_tar(tmp_path / "train.tar", members))


def first_epoch(shard, root, field, **options):
    """What a loader delivers of a field, by sample, and the bytes that it read from the source."""
    with Loader(
        shard, batch_size=SAMPLES, fields={"x": field}, cache=root, world=single_world(),
        workers=Workers(threads=1), reports=Reports(progress=False), **options,
    ) as loader:  # fmt: skip
        (batch,) = list(loader)
        values = dict(zip(batch["sample_id"].tolist(), batch["x"], strict=True))
        return [np.asarray(values[i]).tolist() for i in range(SAMPLES)], loader.stats()


CHANGES = {
    "key of a number": (Int("a"), Int("b")),
    "key of an image": (Image("png"), Image("seg.png")),
    "key of a decoded image": (
        Image("png", resize=Resize(8), decoded=True),
        Image("seg.png", resize=Resize(8), decoded=True),
    ),
    "kind of a text": (Bytes("a"), Text("b")),
    "dtype of tokens": (Tokens("tok"), Tokens("tok", dtype="uint16")),
    "width of tokens": (Tokens("tok"), Tokens("tok", dtype="int64")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_warm_cache_never_serves_what_another_declaration_stored(tmp_path, shard, change):
    before, after = CHANGES[change]
    first_epoch(shard, tmp_path / "cache", before)
    warm, _ = first_epoch(shard, tmp_path / "cache", after)
    cold, _ = first_epoch(shard, tmp_path / "new", after)
    assert warm == cold


def test_a_key_that_no_sample_has_is_named_in_spite_of_a_warm_cache(tmp_path, shard):
    first_epoch(shard, tmp_path / "cache", Int("a"))
    with pytest.raises(FieldError, match=r"holds a, b, png, seg\.png, tok, expected 'nope'"):
        first_epoch(shard, tmp_path / "cache", Int("nope"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Int("a"), Int("a")),
        (Float("a"), Float("a")),
        (Image("png"), Image("png", resize=Resize(4))),
        (Image("png", resize=Resize(4)), Image("png", resize=Resize((6, 8)), channels=1)),
        (Tokens("tok"), Tokens("tok", dtype="int32", length=3, pad=7)),
    ],
)
def test_what_only_delivery_depends_on_stages_nothing_anew(tmp_path, shard, before, after):
    first_epoch(shard, tmp_path / "cache", before)
    entries = sorted(path.name for path in (tmp_path / "cache").iterdir())
    values, stats = first_epoch(shard, tmp_path / "cache", after)
    assert stats["source_bytes"] == 0
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == entries
    assert values == first_epoch(shard, tmp_path / "new", after)[0]


def test_meta_json_tells_the_declaration(tmp_path, shard):
    first_epoch(shard, tmp_path / "cache", Tokens("tok", dtype="int32", length=3))
    (meta,) = tmp_path.glob("cache/train*/node0/meta.json")
    assert json.loads(meta.read_text())["fields"] == {
        "x": {"kind": "Tokens", "key": "tok", "dtype": "<i4"}
    }


def test_a_stage_transform_of_another_member_is_another_dataset(tmp_path, shard):
    def doubled(sample):
        return {"x": sample["x"] * 2}

    root = tmp_path / "cache"
    kept, _ = first_epoch(shard, root, Int("a"), staging=Staging(transform=doubled))
    assert kept == [2 * i for i in range(SAMPLES)]
    _, again = first_epoch(shard, root, Int("a"), staging=Staging(transform=doubled))
    assert again["staging_s"] == 0
    other, stats = first_epoch(shard, root, Int("b"), staging=Staging(transform=doubled))
    plain, _ = first_epoch(shard, tmp_path / "plain", Int("b"))
    assert other == [2 * value for value in plain] != kept
    assert stats["source_bytes"] > 0
    assert len(list(root.glob("train-*"))) == 2


def test_staging_a_key_that_no_sample_has_fails_over_a_warm_cache(tmp_path, shard, capsys):
    def stage(field):
        command = ["cache", "stage", shard, "--fields", field, "--cache", str(tmp_path / "cache")]
        return cli.main(command), capsys.readouterr().err

    assert stage("label=int:a")[0] == 0
    status, said = stage("label=int:nope")
    assert status == 1
    assert "holds a, b, png, seg.png, tok, expected 'nope' for field 'label'" in said
