"""A field of one's own: it says what is kept of a sample, and what is delivered of that."""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dataio import AsList, CorruptRowError, FieldError, Int, Loader, Reports, Staging, Workers
from dataio.rows.fields import row_schema
from dataio.rows.rows import FixedColumn
from dataio.world import single_world
from tests.dataio.source.shards import write_tar

soundfile = pytest.importorskip("soundfile", reason="pip install soundfile, to read audio")

RATE = 8000
BAD = 7
"""Its WAV is no WAV, its point cloud is cut off."""
NUM_SAMPLES = 24


@dataclass(frozen=True)
class Audio:
    """Audio in any form that libsndfile reads, delivered as float32[channels, length]."""

    key: str
    as_list: bool = False

    def column(self, name: str) -> None:
        return None

    def encode(self, raw: Any, where: str) -> bytes:
        return bytes(raw)

    def decode(self, data: memoryview, where: str) -> object:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
        if rate != RATE:
            raise FieldError(f"{where}: {rate} Hz, expected {RATE}")
        wave = torch.from_numpy(samples.T)
        return AsList(wave) if self.as_list else wave


@dataclass(frozen=True)
class PointField:
    """A point cloud, kept as float32[num_points, 3]; `num_points` of it, or all, are delivered."""

    DELIVERED = ("num_points",)

    key: str
    num_points: int | None = None

    def column(self, name: str) -> None:
        return None

    def encode(self, raw: Any, where: str) -> bytes:
        return bytes(raw)

    def decode(self, data: memoryview, where: str) -> object:
        points = np.frombuffer(data, "<f4").reshape(-1, 3)
        if self.num_points is None:
            return AsList(points)
        return points[np.arange(self.num_points) % len(points)]


def wave(i: int, length: int) -> np.ndarray:
    return (np.arange(length) % (i + 2) / 64).astype(np.float32)


def wav(i: int, length: int = 400) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, wave(i, length), RATE, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def cloud(i: int) -> np.ndarray:
    return np.arange(3 * (i + 1), dtype="<f4").reshape(-1, 3)


@pytest.fixture
def shards(tmp_path):
    members = []
    for i in range(NUM_SAMPLES):
        points = cloud(i).tobytes()
        members += [
            (f"s{i:02d}.wav", b"RIFF no" if i == BAD else wav(i)),
            (f"s{i:02d}.long.wav", wav(i, 300 + i)),
            (f"s{i:02d}.xyz", points[:-1] if i == BAD else points),
            (f"s{i:02d}.cls", b"%d" % i),
        ]
    return str(write_tar(tmp_path / "t.tar", members))


def make(shards, tmp_path, fields, **options):
    return Loader(
        shards,
        batch_size=4,
        fields={"label": Int("cls")} | fields,
        cache=tmp_path / "cache",
        world=single_world(),
        reports=Reports(progress=False),
        **options,
    )


WORKERS = [Workers(threads=0), Workers(threads=2), Workers(processes=2)]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_what_it_decodes_is_stacked(tmp_path, shards, workers):
    fields = {"audio": Audio("wav"), "points": PointField("xyz", num_points=5)}
    options = {"workers": workers, "on_error": "skip"}
    with make(shards, tmp_path, fields, **options) as loader:
        batches = list(loader)
    seen = []
    for batch in batches:
        assert batch["audio"].shape == (4, 1, 400)
        assert batch["points"].shape == (4, 5, 3)
        for row, i in enumerate(batch["sample_id"].tolist()):
            if i >= 0:
                assert torch.equal(batch["audio"][row, 0], torch.from_numpy(wave(i, 400)))
                assert np.array_equal(batch["points"][row], np.resize(cloud(i), (5, 3)))
                seen.append(i)
    assert sorted(seen) == [i for i in range(NUM_SAMPLES) if i != BAD]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_what_it_decodes_may_be_a_list(tmp_path, shards, workers):
    fields = {"audio": Audio("long.wav", as_list=True)}
    for transform in (None, hand_on):
        with make(shards, tmp_path, fields, workers=workers, transform=transform) as loader:
            for batch in loader:
                for row, i in enumerate(batch["sample_id"].tolist()):
                    assert torch.equal(batch["audio"][row][0], torch.from_numpy(wave(i, 300 + i)))


def hand_on(sample, rng):
    return sample


def crop(sample, rng):
    """A random piece of 100 samples."""
    audio = sample["audio"]
    start = rng.integers(audio.shape[1] - 99)
    return sample | {"audio": audio[:, start : start + 100]}


def test_a_transform_gets_what_it_decodes_and_brings_it_to_one_shape(tmp_path, shards):
    made = []
    for workers in WORKERS:
        for as_list in (False, True):
            fields = {"audio": Audio("long.wav", as_list)}
            with make(shards, tmp_path, fields, workers=workers, transform=crop) as loader:
                made.append(torch.stack([batch["audio"] for batch in loader]))
    assert made[0].shape == (6, 4, 1, 100)
    assert all(torch.equal(one, made[0]) for one in made)


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_lengths_that_differ_are_one_error_with_the_cure(tmp_path, shards, workers):
    with make(shards, tmp_path, {"audio": Audio("long.wav")}, workers=workers) as loader:
        message = r"t\.tar, .*field 'audio'.*expected float32\[1, 3\d\d\].*crop, pad.*AsList"
        with pytest.raises(FieldError, match=message):
            list(loader)


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize(
    ("field", "message"),
    [
        (Audio("wav"), r"Audio\.decode raised LibsndfileError.*7 bytes beginning b'RIFF no'"),
        (PointField("xyz"), r"PointField\.decode raised ValueError.*on 95 bytes"),
    ],
)
def test_a_sample_that_does_not_decode_is_named(tmp_path, shards, field, message, workers):
    with make(shards, tmp_path, {"x": field}, workers=workers) as loader:
        where = r"t\.tar, sample 7 of 24: sample 7, field 'x': "
        with pytest.raises(FieldError, match=where + message):
            list(loader)


def test_a_damaged_row_is_found_before_it_is_decoded(tmp_path, shards):
    """What a field decodes was checked against the row's checksum, as every field is."""
    with make(shards, tmp_path, {"audio": Audio("long.wav")}) as loader:
        heap = loader._session.pool.cache.directory / "heap-0.bin"
        heap.write_bytes(heap.read_bytes()[:-3000] + b"\0" * 3000)
        loader._session.gather._verifier._repair = None
        with pytest.raises(CorruptRowError, match="does not match its checksum"):
            list(loader)


def test_a_batch_outlives_the_loader(tmp_path, shards):
    """Nothing that is delivered shows the cache's memory, even if a field hands that out."""
    with make(shards, tmp_path, {"points": PointField("xyz")}, on_error="skip") as loader:
        batches = list(loader)
    for batch in batches:
        for row, i in enumerate(batch["sample_id"].tolist()):
            if i >= 0:
                assert np.array_equal(batch["points"][row].numpy(), cloud(i))


def double(sample, rng):
    sample["points"] *= 2
    return sample


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_transform_may_write_into_what_it_decodes(tmp_path, shards, workers):
    options = {"on_error": "skip", "transform": double, "workers": workers}
    with make(shards, tmp_path, {"points": PointField("xyz")}, **options) as loader:
        for batch in loader:
            for row, i in enumerate(batch["sample_id"].tolist()):
                if i >= 0:
                    assert np.array_equal(batch["points"][row].numpy(), 2 * cloud(i))


def loudest(sample):
    return {"loudest": sample["audio"].abs().max(), "label": sample["label"]}


def test_a_stage_transform_gets_what_it_decodes(tmp_path, shards):
    fields = {"audio": Audio("long.wav")}
    with make(shards, tmp_path, fields, staging=Staging(transform=loudest)) as loader:
        for batch in loader:
            expected = [wave(i, 300 + i).max() for i in batch["label"].tolist()]
            assert batch["loudest"].tolist() == expected


def test_what_is_delivered_alone_stages_nothing_anew(tmp_path, shards):
    with make(shards, tmp_path, {"x": PointField("xyz", 5)}) as loader:
        assert loader.stats()["source_bytes"] > 0
    with make(shards, tmp_path, {"x": PointField("xyz", 6)}, on_error="skip") as loader:
        assert next(iter(loader))["x"].shape == (4, 6, 3)
        assert loader.stats()["source_bytes"] < 2000


def test_a_field_of_one_length_decodes_nothing(tmp_path):
    class Fixed(PointField):
        def column(self, name):
            return FixedColumn(name, "<f4", (3,))

    with pytest.raises(ValueError, match="'x' is Fixed, which has a decode and a column"):
        row_schema({"x": Fixed("xyz")})
