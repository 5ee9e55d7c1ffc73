"""A loader's batches: their bytes, their memory, and what transforms make of them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dataio import Bytes, CenterCrop, FieldError, Image, Int, Staging, Tuples, Workers
from dataio.world import run_threads, single_world, thread_worlds
from tests.dataio.loaders import (
    IMAGES,
    POLICIES,
    ImageSource,
    digest,
    jitter,
    loss_of,
    make,
    scramble,
    train,
)
from tests.memory_source import MemorySource, payload


def test_a_kept_batch_never_changes(tmp_path):
    """Every batch of two epochs is kept; none was written over by a later one."""
    source = ImageSource(60)
    with make(
        single_world(), tmp_path, source=source, fields=IMAGES, workers=Workers(threads=2)
    ) as loader:
        kept, sums = [], []
        for _ in loader.epochs(2):
            for batch in loader:
                kept.append(batch)
                sums.append(digest(batch))
    assert [digest(batch) for batch in kept] == sums
    assert len(set(sums)) == len(sums)


def test_a_closed_loader_has_no_row_mapped_even_while_somebody_holds_it(tmp_path):
    def mapped():
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {Path(line.split()[-1]).name for line in lines if str(tmp_path) in line}

    source = ImageSource(60)
    with make(single_world(), tmp_path, source=source, fields=IMAGES) as loader:
        for batch in loader:
            del batch
        assert {"headers.npy", "heap-0.bin"} <= mapped()
    assert not {name for name in mapped() if name.startswith(("fixed", "headers", "heap"))}


def test_dropped_batches_reuse_their_memory(tmp_path):
    with make(single_world(), tmp_path, source=ImageSource(60), fields=IMAGES) as loader:
        for _ in loader.epochs(4):
            for _batch in loader:
                pass
        per_batch = 5  # image, label, and a few in flight of each
        assert loader._session.gather._ring.num_allocated <= 2 * per_batch


@pytest.mark.parametrize("num_threads", [0, 2, 5])
def test_the_same_batches_for_any_number_of_threads(tmp_path, num_threads):
    def run(threads):
        with make(
            single_world(),
            tmp_path,
            source=ImageSource(60),
            fields=IMAGES,
            transform=jitter,
            batch_transform=scramble,
            workers=Workers(threads=threads),
        ) as loader:
            return train(loader, 2)

    assert run(num_threads) == run(1)


def test_images_are_delivered_as_they_were(tmp_path):
    with make(single_world(), tmp_path, source=ImageSource(12), fields=IMAGES) as loader:
        for batch in loader:
            assert batch["image"].dtype == torch.uint8
            assert batch["image"].shape == (5, 3, 6, 5)
            for image, i in zip(batch["image"], batch["sample_id"].tolist(), strict=True):
                if i >= 0:
                    pixels = np.random.default_rng(i).integers(0, 256, (6, 5, 3), np.uint8)
                    assert np.array_equal(image.numpy(), pixels.transpose(2, 0, 1))


def test_variable_bytes_come_whole(tmp_path):
    with make(
        single_world(), tmp_path, fields={"data": Bytes("bin"), "label": Int("cls")}
    ) as loader:
        for batch in loader:
            for data, i in zip(batch["data"], batch["sample_id"].tolist(), strict=True):
                assert i < 0 or data == payload(i)


def test_a_transform_that_returns_nothing_is_named(tmp_path):
    with (
        make(single_world(), tmp_path, transform=lambda sample, rng: None) as loader,
        pytest.raises(Exception, match="transform: returned NoneType"),
    ):
        next(iter(loader))


def test_a_transform_draws_by_sample_and_epoch_and_nothing_else(tmp_path):
    def noise(world, root):
        with make(world, root, transform=jitter) as loader:
            drawn = {}
            for epoch in loader.epochs(2):
                for batch in loader:
                    for i, row in zip(batch["sample_id"].tolist(), batch["noise"], strict=True):
                        drawn[epoch, i] = tuple(row.tolist())
            return {place: row for place, row in drawn.items() if place[1] >= 0}

    alone = noise(single_world(), tmp_path / "alone")
    both = run_threads(thread_worlds([1, 1]), lambda world: noise(world, tmp_path / "both"))
    assert both[0] | both[1] == alone, "whoever draws, draws the same"
    assert len(set(alone.values())) == 2 * 61, "each sample and each epoch draws its own"


def test_padding_is_not_reported(tmp_path):
    with make(single_world(), tmp_path, importance=POLICIES["kakurenbo"]) as loader:
        for batch in loader:
            loader.report(batch, batch["sample_id"].float(), *loss_of(batch["sample_id"], 0)[1:])
        loader._session.feedback.flush()
        scores, ids = (
            loader._session.pool.scores["loss"],
            loader._session.pool.cache.entries.sample_id[:],
        )
        assert (batch["slot"] < 0).any(), "the last batch holds padding"
        assert scores.tolist() == ids.astype(np.float32).tolist()


def halve(sample):
    """A transform for staging: a smaller image, and the label doubled."""
    small = sample["image"][::2, ::3].copy()
    return {"image": small, "as_array": small, "label": sample["label"] * 2}


def test_a_staged_transform_is_applied_once_and_its_arrays_are_delivered(tmp_path):
    for run in range(2):
        source = ImageSource(60)
        with make(
            single_world(), tmp_path, source=source, fields=IMAGES, staging=Staging(transform=halve)
        ) as loader:
            for _ in loader.epochs(2):
                for batch in loader:
                    for row, i in enumerate(batch["sample_id"].tolist()):
                        pixels = np.random.default_rng(i).integers(0, 256, (6, 5, 3), np.uint8)
                        small = pixels[::2, ::3]
                        assert np.array_equal(batch["image"][row], small.transpose(2, 0, 1))
                        assert np.array_equal(batch["as_array"][row], small)
                        assert int(batch["label"][row]) == 2 * (i % 4)
            evaluation = loader.evaluation(ImageSource(7, name="other"))
            assert {tuple(batch["image"].shape) for batch in evaluation} == {(5, 3, 3, 2)}
        assert run == 0 or len(source.rows_read) == 0


def test_an_evaluation_may_have_fields_of_its_own(tmp_path):
    with make(single_world(), tmp_path, source=ImageSource(60), fields=IMAGES) as loader:
        small = IMAGES | {"image": Image("png", crop=CenterCrop((2, 4)))}
        batches = list(loader.evaluation(ImageSource(7, name="other"), fields=small))
        assert {tuple(batch["image"].shape) for batch in batches} == {(5, 3, 2, 4)}
        assert sum(int(batch["valid"].sum()) for batch in batches) == 7
        assert tuple(next(iter(loader))["image"].shape) == (5, 3, 6, 5)


def test_rows_that_arrived_are_checked_when_they_are_first_read(tmp_path):
    """The slots they took were checked in the epoch before, with other rows in them."""

    def run(world):
        source = MemorySource(60)  # halved evenly: every row leaves
        with make(
            world, tmp_path, source=source, exchange=1.0, workers=Workers(threads=0)
        ) as loader:
            for epoch in loader.epochs(2):
                if epoch == 1:
                    cache = loader._session.pool.cache
                    cache.files.fixed[0].rows[cache.entries.position[:], 0] ^= 0x40
                for batch in loader:
                    valid = batch["slot"] >= 0
                    assert torch.equal(batch["label"][valid], batch["sample_id"][valid] % 10)

    run_threads(thread_worlds([1, 1]), run)


def test_a_loader_in_words_says_how_far_it_is_and_what_was_read(tmp_path):
    with make(single_world(), tmp_path, source=MemorySource(61), batch_size=4) as loader:
        next(iter(loader))
        begins = "Loader(61 samples, batches of 4, rank 0 of 1; epoch 0, step 1; read "
        assert repr(loader).startswith(begins)
    assert repr(loader).startswith(begins), "of a closed one too"


def test_a_loop_that_takes_batches_apart_is_told_that_they_are_dicts_before_it_begins(tmp_path):
    with make(single_world(), tmp_path, source=ImageSource(20), fields=IMAGES) as loader:
        words = r"`for batch in loader` and batch\['image'\], or `for image, label in dataio\.T"
        with pytest.raises(
            TypeError, match=words + r"uples\(loader, 'image', 'label'\)`, where drop_l"
        ):
            for _image, _label in loader:
                pass
        assert (loader.epoch, loader.step) == (0, 0)
        assert [sorted(batch)[0] for batch in loader] == ["image"] * len(loader)
        assert all(isinstance(batch, dict) for _, batch in enumerate(loader))
    with make(
        single_world(), tmp_path / "collated", source=ImageSource(20), fields=IMAGES,
        collate=lambda samples: ([s["image"] for s in samples], [s["label"] for s in samples]),
    ) as loader:  # fmt: skip
        for images, labels in loader:
            assert len(images) == len(labels) == loader.batch_size


def test_tuples_say_once_that_padding_is_trained(tmp_path, caplog):
    with make(single_world(), tmp_path, source=ImageSource(18), fields=IMAGES) as loader:
        padded = -len(loader) * -loader.batch_size - 18
        assert padded > 0
        pairs = Tuples(loader, "image", "label")
        for _ in loader.epochs(2):
            assert len(list(pairs)) == len(loader)
        loader.set_epoch(2)
        assert len(list(Tuples(loader, "image", "weight"))) == len(loader)
    (said,) = [each.message for each in caplog.records if "Tuples" in each.message]
    assert f"Tuples: {padded} of the last batch's {loader.batch_size} rows are padding" in said


def test_tuples_have_the_fields_in_the_order_that_was_asked_for(tmp_path):
    with make(single_world(), tmp_path, source=ImageSource(20), fields=IMAGES) as loader:
        pairs = Tuples(loader, "label", "weight", "image")
        assert len(pairs) == len(loader)
        given = [(label, weight, image) for label, weight, image in pairs]
        loader.set_epoch(0)
        for (label, weight, image), batch in zip(given, loader, strict=True):
            assert torch.equal(label, batch["label"])
            assert torch.equal(weight, batch["weight"])
            assert torch.equal(image, batch["image"])
        evaluation = loader.evaluation(ImageSource(20))
        valid = [valid for _, valid in Tuples(evaluation, "image", "valid")]
        assert int(torch.cat(valid).sum()) == 20
        with pytest.raises(FieldError, match=r"no 'labels', expected one of image, label, weight"):
            next(iter(Tuples(loader, "labels")))
