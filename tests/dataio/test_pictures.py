"""Crops and flips follow from seed, epoch and sample alone, however batches are made."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

import importance
import shuffle
from dataio import (
    CenterCrop,
    FieldError,
    Image,
    ImageSize,
    Int,
    Loader,
    Mask,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    Reports,
    Resize,
    ResizeShort,
    Workers,
)
from dataio.base.seeding import key, uniform
from dataio.batch import fill
from dataio.rows import at_once, jpeg
from dataio.rows.decode import decode_image
from dataio.rows.fields import Field, row_schema
from dataio.rows.rows import make_rows
from dataio.rows.samples import OnError
from dataio.rows.views import NUM_DRAWS, Size
from dataio.world import run_threads, single_world, thread_worlds
from tests.dataio.source.shards import write_tar
from tests.memory_source import MemorySource

NUM_SAMPLES = 46
CROP = RandomResizedCrop((20, 24), scale=(0.2, 1.0))
FIELDS = {
    "image": Image("jpg", crop=CROP, flip=0.5),
    "mask": Mask("png", crop=CROP, flip=0.5),
    "pixels": Image(
        "jpg", resize=Resize(30), crop=RandomCrop(24, padding=2), flip=0.5, decoded=True
    ),
    "size": ImageSize("jpg"),
    "label": Int("cls"),
}


def picture(sample_id: int) -> np.ndarray:
    """Pixels of many sizes, those of one sample always the same."""
    rng = np.random.default_rng(sample_id)
    height, width = 30 + sample_id % 11, 30 + sample_id % 17
    small = rng.integers(0, 256, (8, 8, 3), np.uint8)
    return np.asarray(Pillow.fromarray(small).resize((width, height), Pillow.Resampling.BILINEAR))


def compressed(sample_id: int, key: str) -> bytes:
    file = io.BytesIO()
    pixels = picture(sample_id)
    if key == "jpg":
        Pillow.fromarray(pixels).save(file, "JPEG", quality=90)
    else:
        Pillow.fromarray(pixels[..., 0] // 32).save(file, "PNG")
    return file.getvalue()


class Pictures(MemorySource):
    """Encodes what the fields ask for, as a source does."""

    torn: int | None = None
    instead: Mapping[int, bytes] = {}

    def read(self, sample_ids, fields):
        schema = row_schema(fields)
        for i in np.asarray(sample_ids, np.int64).tolist():
            stored = {}
            for name, field in fields.items():
                raw = i % 10 if field.key == "cls" else compressed(i, field.key)
                raw = self.instead.get(i, raw) if field.key == "jpg" else raw
                if i == self.torn and isinstance(raw, bytes) and field.column(name) is None:
                    raw = raw[: len(raw) // 2]
                stored[name] = bytes(field.encode(raw, f"sample {i}"))
            fixed = [np.frombuffer(stored[c.name], np.uint8)[None] for c in schema.fixed]
            variable = [np.frombuffer(stored[name], np.uint8) for name in schema.variable]
            lengths = np.array([[len(data) for data in variable]], np.int64)
            yield make_rows(schema, np.array([i]), fixed, lengths, variable)


def open_loader(world, root, *, workers=None, fields=FIELDS, batch_size=4, source=None, **options):
    return Loader(
        source or Pictures(NUM_SAMPLES),
        cache=root,
        world=world,
        fields=fields,
        batch_size=batch_size,
        shuffle=shuffle.Partial(0.3),
        seed=5,
        workers=workers or Workers(threads=0),
        reports=Reports(progress=False),
        **options,
    )


def taken(loader, epochs=2):
    """{(epoch, sample): the bytes of all its fields}."""
    seen = {}
    for epoch in loader.epochs(epochs):
        for batch in loader:
            for row, sample_id in enumerate(batch["sample_id"].tolist()):
                if batch["weight"][row]:
                    seen[epoch, sample_id] = b"|".join(
                        batch[name][row].numpy().tobytes() for name in FIELDS
                    )
    return seen


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with open_loader(single_world(), tmp_path_factory.mktemp("cache")) as loader:
        return taken(loader)


def test_each_sample_is_cut_by_its_own_numbers(expected) -> None:
    assert len(expected) == 2 * NUM_SAMPLES
    changed = sum(expected[0, i] != expected[1, i] for i in range(NUM_SAMPLES))
    assert changed == NUM_SAMPLES
    for (epoch, i), found in expected.items():
        stream = key(5, "pictures", epoch=epoch)
        (draws,) = uniform(stream, np.array([i]), NUM_DRAWS).tolist()
        out = np.empty((20, 24, 3), np.uint8)
        decode_image(memoryview(compressed(i, "jpg")), out, FIELDS["image"], draws, where="here")  # type: ignore[arg-type]
        assert found.startswith(out.transpose(2, 0, 1).tobytes())
        assert np.array(picture(i).shape[:2], "<i8").tobytes() in found


@pytest.mark.parametrize(
    "workers",
    [Workers(threads=1), Workers(threads=2), Workers(threads=4), Workers(processes=2)],
    ids=str,
)
def test_threads_and_processes_change_no_byte(tmp_path, expected, workers) -> None:
    with open_loader(single_world(), tmp_path, workers=workers) as loader:
        assert taken(loader) == expected


@pytest.mark.parametrize("nodes", [[2], [1, 1], [2, 2]], ids=str)
def test_ranks_change_no_byte(tmp_path, expected, nodes) -> None:
    def rank(world):
        with open_loader(world, tmp_path / str(world.node), batch_size=3) as loader:
            return taken(loader)

    seen: dict[tuple[int, int], bytes] = {}
    for part in run_threads(thread_worlds(nodes), rank):
        seen |= part
    assert seen == expected


def test_a_resumed_run_cuts_as_if_it_had_not_stopped(tmp_path, expected) -> None:
    seen = {}
    with open_loader(single_world(), tmp_path / "cache") as loader:
        for _ in loader:
            if loader.step == 5:
                loader.save(tmp_path / "save")
                break
    with open_loader(single_world(), tmp_path / "cache", batch_size=7) as loader:
        loader.restore(tmp_path / "save")
        seen = taken(loader)
    assert 0 < len(seen) < 2 * NUM_SAMPLES
    assert seen.items() <= expected.items()


def test_without_the_library_no_byte_changes(tmp_path, expected, monkeypatch) -> None:
    monkeypatch.setattr(jpeg, "turbojpeg", lambda: None)
    monkeypatch.setattr(jpeg, "_THREAD", type(jpeg._THREAD)())
    with open_loader(single_world(), tmp_path) as loader:
        assert taken(loader) == expected


def test_without_the_compiled_part_no_byte_changes(tmp_path, expected, monkeypatch) -> None:
    monkeypatch.setattr(at_once, "library", lambda: None)
    with open_loader(single_world(), tmp_path) as loader:
        assert taken(loader) == expected


def test_usual_pictures_are_not_decoded_one_by_one(tmp_path, expected, monkeypatch) -> None:
    if at_once.library() is None or jpeg.turbojpeg() is None:
        pytest.skip("the compiled part is not there")
    kinds = set()

    def counted(pictures, out, how, *args, **options):
        kinds.add(type(how).__name__)
        return decode_image(pictures, out, how, *args, **options)

    monkeypatch.setattr(fill, "decode_image", counted)
    monkeypatch.setattr(fill, "store_pixels", lambda *args, **options: pytest.fail("one by one"))
    with open_loader(single_world(), tmp_path) as loader:
        assert taken(loader) == expected
    assert kinds == {"Mask"}


def of_sizes(directory: Path, image: Size, mask: Size) -> str:
    """A sample of one size, then one whose mask may have another, in a tar."""
    members = []
    for number, sizes in enumerate(((image, image), (image, mask))):
        for ending, size in zip(("jpg", "png"), sizes, strict=True):
            file = io.BytesIO()
            form = "JPEG" if ending == "jpg" else "PNG"
            Pillow.new("L", (size[1], size[0])).save(file, form)
            members.append((f"{number}.{ending}", file.getvalue()))
    return str(write_tar(directory / "a.tar", members))


def weights_of(path: str, directory: Path, *, on_error: OnError = "raise", **view: Any) -> Any:
    fields: dict[str, Field] = {"i": Image("jpg", **view), "m": Mask("png", **view)}
    with Loader(
        path, batch_size=2, fields=fields, cache=directory / "cache", on_error=on_error,
        workers=Workers(threads=0), reports=Reports(progress=False),
    ) as loader:  # fmt: skip
        return [sorted(batch["weight"].tolist()) for batch in loader]


@pytest.mark.parametrize("crop", [RandomCrop(16), CenterCrop(16), Pad(64)], ids=str)
def test_a_mask_of_another_size_is_not_cropped_beside_its_picture(tmp_path, crop) -> None:
    path = of_sizes(tmp_path, (40, 60), (20, 30))
    expected = (
        r"sample 1, field 'm': is 20 x 30 \(height x width\), expected 40 x 60 as field 'i', or "
        rf"{type(crop).__name__}\(.*declare resize="
    )
    with pytest.raises(FieldError, match=expected):
        weights_of(path, tmp_path, crop=crop)
    assert weights_of(path, tmp_path, crop=crop, on_error="skip") == [[0.0, 1.0]]


@pytest.mark.parametrize("resize", [Resize(20), ResizeShort(20)], ids=str)
def test_a_mask_of_another_size_is_cropped_after_a_resize(tmp_path, resize) -> None:
    path = of_sizes(tmp_path, (40, 61), (20, 30))
    assert weights_of(path, tmp_path, resize=resize, crop=RandomCrop(16)) == [[1.0, 1.0]]


def test_a_part_of_random_sides_is_the_same_of_a_mask_of_half_the_size(tmp_path) -> None:
    members = []
    for ending, form, height, width in (("jpg", "JPEG", 60, 80), ("png", "PNG", 30, 40)):
        columns = (np.arange(width) * (80 // width)).astype(np.uint8)
        file = io.BytesIO()
        Pillow.fromarray(np.broadcast_to(columns, (height, width))).save(file, form)
        members.append((f"0.{ending}", file.getvalue()))
    view: Any = {"crop": RandomResizedCrop(20), "flip": 0.5}
    fields: dict[str, Field] = {"i": Image("jpg", channels=1, **view), "m": Mask("png", **view)}
    with Loader(
        str(write_tar(tmp_path / "a.tar", members)), batch_size=1, fields=fields,
        cache=tmp_path / "cache", workers=Workers(threads=0), reports=Reports(progress=False),
    ) as loader:  # fmt: skip
        for _ in loader.epochs(4):
            (batch,) = loader
            apart = batch["i"][0, 0].int() - batch["m"][0].int()
            assert int(apart.abs().max()) <= 6, "of 80 columns: two pixels of the mask, and JPEG"


@pytest.mark.parametrize("crop", [RandomCrop(16), RandomResizedCrop(16)], ids=str)
def test_a_mask_of_other_proportions_is_refused(tmp_path, crop) -> None:
    path = of_sizes(tmp_path, (40, 60), (60, 40))
    with pytest.raises(FieldError, match=r"is 60 x 40 .*, expected 40 x 60 as field 'i'"):
        weights_of(path, tmp_path, resize=ResizeShort(20), crop=crop)


def test_another_crop_stages_nothing_anew(tmp_path) -> None:
    with open_loader(single_world(), tmp_path) as loader:
        next(iter(loader))
    fields = FIELDS | {
        "image": Image("jpg", resize=Resize(8), channels=1),
        "mask": Mask("png", resize=Resize(8)),
        "pixels": Image("jpg", resize=Resize(30), decoded=True),
    }
    with open_loader(single_world(), tmp_path, fields=fields) as loader:
        batch = next(iter(loader))
        assert loader.stats()["source_bytes"] == 0
    assert batch["image"].shape == (4, 1, 8, 8)
    assert batch["mask"].shape == (4, 8, 8)
    assert batch["pixels"].shape == (4, 3, 30, 30)
    assert batch["size"].shape == (4, 2)


@pytest.mark.parametrize("workers", [Workers(threads=2), Workers(processes=1)], ids=str)
def test_a_torn_picture_is_raised_or_skipped(tmp_path, expected, workers) -> None:
    source = Pictures(NUM_SAMPLES)
    source.torn = 13
    fields = {name: FIELDS[name] for name in ("image", "mask", "label")}
    one = open_loader(single_world(), tmp_path, source=source, fields=fields, workers=workers)
    with (
        one as loader,
        pytest.raises(FieldError, match=r"^memory: sample 13, field '(image|mask)'"),
    ):
        list(loader)
    two = open_loader(
        single_world(), tmp_path, source=source, fields=fields, workers=workers, on_error="skip"
    )
    with two as loader:
        seen = [i for b in loader for i, w in zip(b["sample_id"], b["weight"], strict=True) if w]
    assert sorted(map(int, seen)) == [i for i in range(NUM_SAMPLES) if i != 13]


def test_a_row_that_comes_twice_is_cut_in_two_ways(tmp_path) -> None:
    weights = np.full(NUM_SAMPLES, 0.0)
    weights[:5] = 1.0
    policy = importance.Weighted(weights, num_samples=15)
    fields = {"image": FIELDS["image"]}
    with open_loader(single_world(), tmp_path, fields=fields, importance=policy) as loader:
        seen = [
            (i, image.numpy().tobytes())
            for batch in loader
            for i, image, w in zip(
                batch["sample_id"].tolist(), batch["image"], batch["weight"], strict=True
            )
            if w
        ]
    assert sorted(i for i, _ in seen) == sorted([*range(5)] * 3)
    assert len(set(seen)) == 15


def test_an_evaluation_is_not_cropped_at_random_unless_it_is_told_to_be(tmp_path) -> None:
    other = Pictures(NUM_SAMPLES, name="other")
    with open_loader(single_world(), tmp_path) as loader:
        with pytest.raises(ValueError, match=r"^evaluation: field 'image' .* draws .*give fields="):
            loader.evaluation(other)
        whole = {"image": Image("jpg", resize=Resize(8))}
        plain = [batch["image"] for batch in loader.evaluation(other, fields=whole)]
        drawn = list(loader.evaluation(other, fields={"image": FIELDS["image"]}))
    assert plain[0].shape == (4, 3, 8, 8)
    assert drawn[0]["image"].shape == (4, 3, 20, 24)
