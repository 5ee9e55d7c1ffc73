import errno
import hashlib
import io
import json
import logging
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image as PillowImage

import dataio.state.snapshot
import shuffle
from dataio import Bytes, Image, Int, Loader, Reports, Staging, StateError, Workers, WorldError
from dataio.cache.cache import Cache
from dataio.cache.commit_log import CommitLog
from dataio.rows.fields import row_schema
from dataio.rows.rows import make_rows
from dataio.world import run_threads, single_world, thread_worlds
from importance import Kakurenbo, RandomPrune
from tests.memory_source import FIELDS, MemorySource, payload

EPOCHS = 3


class ImageSource(MemorySource):
    """Small PNGs whose pixels follow from the sample's id."""

    def read(self, sample_ids, fields):
        schema = row_schema(fields)
        for i in np.asarray(sample_ids, np.int64).tolist():
            buffer = io.BytesIO()
            pixels = np.random.default_rng(i).integers(0, 256, (6, 5, 3), np.uint8)
            PillowImage.fromarray(pixels).save(buffer, "PNG")
            data = np.frombuffer(buffer.getvalue(), np.uint8)
            label = np.array([[i % 4]], "<i8").view(np.uint8)
            yield make_rows(schema, np.array([i]), [label], np.array([[len(data)]]), [data])


IMAGES = {"image": Image("png"), "label": Int("cls")}


def jitter(sample, rng):
    """A transform that draws: its result tells which numbers it was given."""
    return sample | {"noise": rng.normal(size=3).astype(np.float32)}


def scramble(batch, rng):
    return batch | {"mix": torch.from_numpy(rng.integers(0, 100, 2))}


def make(world, root, *, importance=None, source=None, exchange=0.3, **options):
    chosen: dict[str, Any] = {"batch_size": 5, "fields": FIELDS, "seed": 7}
    chosen |= {"workers": Workers(threads=1), "reports": Reports(progress=False)}
    return Loader(
        source or MemorySource(61),
        cache=root,
        world=world,
        shuffle=shuffle.Partial(exchange),
        importance=importance,
        **(chosen | options),
    )


def digest(batch):
    """A hash of everything a batch holds."""
    seen = hashlib.sha256()
    for name, value in sorted(batch.items()):
        seen.update(name.encode())
        data = value.numpy().tobytes() if isinstance(value, torch.Tensor) else b"|".join(value)
        seen.update(data)
    return seen.hexdigest()


def loss_of(ids, epoch):
    """A loss that differs by sample and epoch, and an outcome that lets about half be hidden."""
    loss = torch.sin(ids.float() * 12.9898 + epoch) + 1.1
    return loss, ids % 2 == 0, torch.full((len(ids),), 0.9)


def train(loader, epochs=EPOCHS, *, save_at=None, path=None):
    """Run to the end, or save at a step and stop: a list of (epoch, kind, step, digest)."""
    seen = []
    for epoch in loader.epochs(epochs):
        for batch in loader:
            loader.report(batch, *loss_of(batch["sample_id"], epoch))
            seen.append((epoch, "train", loader.step, digest(batch)))
            if save_at == (epoch, loader.step):
                loader.save(path)
                return seen
        for batch in loader.refresh():
            loader.report(batch, *loss_of(batch["sample_id"], epoch + 0.5))
            seen.append((epoch, "refresh", 0, digest(batch)))
    return seen


POLICIES = {
    "off": None,
    "kakurenbo": Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0),
    "random": RandomPrune(0.25, delta=0.9),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_prefix_and_resume_equal_the_uninterrupted_run_at_every_step(tmp_path, policy):
    """Save after every step, go on in new loaders with another thread count: byte for byte."""

    def whole(world):
        with make(
            world, tmp_path / "whole", importance=POLICIES[policy], transform=jitter
        ) as loader:
            return train(loader)

    uninterrupted = run_threads(thread_worlds([1, 1]), whole)
    stops = [(epoch, step) for epoch, kind, step, _ in uninterrupted[0] if kind == "train"]
    assert len({epoch for epoch, _ in stops}) == EPOCHS
    for number, stop in enumerate(stops):
        root, path = tmp_path / f"part{number}", tmp_path / f"saved{number}"

        def first(world, root=root, stop=stop, path=path):
            with make(world, root, importance=POLICIES[policy], transform=jitter) as loader:
                return train(loader, save_at=stop, path=path)

        def rest(world, root=root, path=path):
            loader = make(
                world,
                root,
                importance=POLICIES[policy],
                transform=jitter,
                workers=Workers(threads=(0, 3)[world.rank % 2]),
            )
            with loader:
                loader.restore(path)
                return train(loader)

        begun = run_threads(thread_worlds([1, 1]), first)
        ended = run_threads(thread_worlds([1, 1]), rest)
        for rank in range(2):
            assert begun[rank] + ended[rank] == uninterrupted[rank], f"stopped at {stop}"


def test_hiding_policies_hide(tmp_path):
    """Otherwise the test above would prove nothing about hidden rows."""
    for name in ("kakurenbo", "random"):
        with make(single_world(), tmp_path / name, importance=POLICIES[name]) as loader:
            train(loader, 2)
            assert loader.stats()["hidden_fraction"] > 0.05


def test_the_state_is_small_json_and_goes_on_without_importance(tmp_path):
    with make(single_world(), tmp_path) as loader:
        loader.set_epoch(0)
        batches = [digest(batch) for batch in loader]
    with make(single_world(), tmp_path) as loader:
        loader.set_epoch(0)
        for _, _batch in zip(range(4), loader, strict=False):
            pass
        state = json.dumps(loader.state_dict())
        assert len(state) < 1024
    with make(single_world(), tmp_path) as loader:
        loader.load_state_dict(json.loads(state))
        assert [digest(batch) for batch in loader] == batches[4:]


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
        assert loader._parts.gather._ring.num_allocated <= 2 * per_batch


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


@pytest.mark.parametrize("layout", [[1], [2, 2], [3, 1], [3, 2, 2]])
@pytest.mark.parametrize("policy", POLICIES)
def test_visible_rows_are_trained_once_in_equally_many_steps(tmp_path, layout, policy):
    def run(world):
        with make(
            world, tmp_path, importance=POLICIES[policy], workers=Workers(threads=0), batch_size=2
        ) as loader:
            epochs = []
            for epoch in loader.epochs(EPOCHS):
                ids, steps, weight = [], 0, []
                for batch in loader:
                    valid = batch["slot"] >= 0
                    ids += batch["sample_id"][valid].tolist()
                    weight.append(batch["weight"].numpy())
                    assert (batch["weight"][~valid] == 0).all()
                    assert batch["weight"].shape == (2,)
                    loader.report(batch, *loss_of(batch["sample_id"], epoch))
                    steps += 1
                assert steps == len(loader)
                refreshed = []
                for batch in loader.refresh():
                    refreshed += batch["sample_id"][batch["slot"] >= 0].tolist()
                epochs.append((ids, refreshed, steps, weight, loader.lr_factor))
            return epochs

    everyone = run_threads(thread_worlds(layout), run)
    hidden_sometimes = False
    for epoch in range(EPOCHS):
        now = [rank[epoch] for rank in everyone]
        trained = [i for ids, *_ in now for i in ids]
        refreshed = [i for _, ids, *_ in now for i in ids]
        assert len(set(trained)) == len(trained), "a row is trained once"
        assert len({steps for _, _, steps, *_ in now}) == 1, "equal steps"
        assert len({factor for *_, factor in now}) == 1
        hidden_sometimes |= len(trained) < 61
        if policy == "off":
            assert sorted(trained) == list(range(61))
        if policy == "kakurenbo":
            assert sorted(trained + refreshed) == list(range(61)), "hidden + visible = owned"
        for step in range(now[0][2]):
            # Averaging over replicas and rows must weigh every valid row alike.
            total = np.mean([weight[step] for *_, weight, _ in now])
            valid = sum((weight[step] > 0).sum() for *_, weight, _ in now)
            assert valid > 0
            if policy != "random":
                assert total == pytest.approx(1.0, rel=1e-5)
        if policy == "random":
            # The pruned rows are made up for: weights of all rows add up to the dataset, pool by
            # pool.
            weights = np.concatenate([np.concatenate(weight) for *_, weight, _ in now])
            assert weights[weights > 0].min() >= 1.0
    assert hidden_sometimes == (policy != "off")


def test_global_shuffle_trains_every_row_once_over_all_nodes(tmp_path):
    def run(world):
        loader = Loader(
            MemorySource(61),
            cache=tmp_path,
            world=world,
            workers=Workers(threads=0),
            shuffle=shuffle.Global(),
            importance=POLICIES["kakurenbo"],
            batch_size=5,
            fields=FIELDS,
            seed=7,
            reports=Reports(progress=False),
        )
        with loader:
            seen = []
            for epoch in loader.epochs(3):
                ids = []
                for batch in loader:
                    ids += batch["sample_id"][batch["slot"] >= 0].tolist()
                    loader.report(batch, *loss_of(batch["sample_id"], epoch))
                for batch in loader.refresh():
                    ids += batch["sample_id"][batch["slot"] >= 0].tolist()
                    loader.report(batch, *loss_of(batch["sample_id"], epoch))
                seen.append(ids)
            return seen, loader._parts.pool.scores.copy()

    everyone = run_threads(thread_worlds([2, 1]), run)
    for epoch in range(3):
        assert sorted(i for rank, _ in everyone for i in rank[epoch]) == list(range(61))
    assert everyone[0][0][0] != everyone[0][0][1]


def test_the_source_is_read_once(tmp_path):
    source = MemorySource(61)
    with make(single_world(), tmp_path, source=source) as loader:
        train(loader, 3)
    assert sorted(source.rows_read) == list(range(61))
    again = MemorySource(61)
    with make(single_world(), tmp_path, source=again) as loader:
        train(loader, 3)
    assert again.rows_read == [], "a second job starts warm"


def test_evaluation_gives_every_sample_once_on_any_layout(tmp_path):
    def run(world):
        with make(world, tmp_path) as loader:
            evaluation = loader.evaluation(MemorySource(23, name="other"))
            batches = list(evaluation)
            assert len(batches) == len(evaluation)
            evaluation.close()
            return [batch["sample_id"][batch["valid"]].tolist() for batch in batches], [
                len(batch["valid"]) for batch in batches
            ]

    everyone = run_threads(thread_worlds([2, 1]), run)
    assert sorted(i for rank, _ in everyone for batch in rank for i in batch) == list(range(23))
    assert len({len(rank) for rank, _ in everyone}) == 1
    assert {rows for _, sizes in everyone for rows in sizes} == {5}


def test_set_epoch_drives_it_like_a_distributed_sampler(tmp_path):
    def by_epochs(world):
        with make(world, tmp_path / "a") as loader:
            return [e[3] for e in train(loader, 4)]

    def by_set_epoch(world):
        with make(world, tmp_path / "b") as loader:
            seen = []
            for epoch in range(4):
                loader.set_epoch(epoch)
                assert len(loader) == 7
                seen += [digest(batch) for batch in loader]
            return seen

    def jumping(world):
        with make(world, tmp_path / "c") as loader:
            loader.set_epoch(3)
            return [digest(batch) for batch in loader]

    one, other, last = (
        run_threads(thread_worlds([1, 1]), f) for f in (by_epochs, by_set_epoch, jumping)
    )
    assert one == other
    assert [rank[-7:] for rank in one] == last, "epoch 3 is the same by whatever way"


def test_len_counts_what_comes(tmp_path):
    for batch_size in (1, 4, 5, 61):
        with make(single_world(), tmp_path, batch_size=batch_size) as loader:
            assert len(list(loader)) == len(loader) == loader.max_steps(1) == -(-61 // batch_size)


def test_variable_bytes_come_whole(tmp_path):
    with make(
        single_world(), tmp_path, fields={"data": Bytes("bin"), "label": Int("cls")}
    ) as loader:
        for batch in loader:
            for data, i in zip(batch["data"], batch["sample_id"].tolist(), strict=True):
                assert i < 0 or data == payload(i)


def test_a_batch_larger_than_a_share_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"batch_size: 64 is more than a replica's share of 61 rows.*at most"
    ):
        make(single_world(), tmp_path, batch_size=64)


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_batch_without_rows_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match=f"batch_size is {wrong}, expected a number >= 1"):
        make(single_world(), tmp_path, batch_size=wrong)


def test_a_report_of_the_wrong_length_is_refused(tmp_path):
    with make(single_world(), tmp_path, importance=POLICIES["kakurenbo"]) as loader:
        batch = next(iter(loader))
        with pytest.raises(
            ValueError, match=r'loss has shape \(\), expected \(5,\).*reduction="none"'
        ):
            loader.report(batch, torch.tensor(1.0))
        with pytest.raises(ValueError, match=r"confidence has shape \(4,\)"):
            loader.report(batch, torch.ones(5), torch.ones(5), torch.ones(4))


def test_ranks_made_differently_are_told_which(tmp_path):
    def run(world):
        make(world, tmp_path, seed=world.rank)

    with pytest.raises(WorldError, match="rank 1 was made with seed 1, rank 0 with 0"):
        run_threads(thread_worlds([1, 1]), run)


def test_another_checkpoint_is_refused(tmp_path):
    with make(single_world(), tmp_path / "a") as loader:
        loader.save(tmp_path / "saved")
    with (
        make(single_world(), tmp_path / "b", seed=8) as loader,
        pytest.raises(StateError, match="seed is 7, this loader has 8"),
    ):
        loader.restore(tmp_path / "saved")
    with (
        make(single_world(), tmp_path / "b") as loader,
        pytest.raises(StateError, match="no saved loader state here"),
    ):
        loader.restore(tmp_path / "nowhere")


def test_state_without_scores_warns_under_importance(tmp_path, caplog):
    with make(single_world(), tmp_path, importance=POLICIES["kakurenbo"]) as loader:
        state = loader.state_dict()
        with caplog.at_level(logging.WARNING):
            loader.load_state_dict(state)
        assert "the score history is not part of state_dict" in caplog.text


RANDOM = RandomPrune(0.5, delta=1.0)
HIDING = Kakurenbo(0.5, drops=(), alphas=(1.0,), tau=0.0)


@pytest.mark.parametrize(
    ("before", "after", "batch_size", "message"),
    [
        (RANDOM, None, 5, r"epoch 1 hides \d+ rows, with the importance of this loader 0, so"),
        (None, RANDOM, 5, r"epoch 1 hides 0 rows, with the importance of this loader \d+, so"),
        (HIDING, None, 5, r"epoch 1 hides \d+ rows, with the importance of this loader 0, so"),
        (RANDOM, None, 4, r"epoch 1 was begun on other ranks or with another batch size, and"),
        (RANDOM, RANDOM, 5, None),
    ],
)
def test_a_state_goes_on_amid_an_epoch_only_with_what_that_epoch_hid(
    tmp_path, before, after, batch_size, message
):
    """Else samples of that epoch would be skipped or repeated."""
    first = []
    with make(single_world(), tmp_path, importance=before, batch_size=5) as loader:
        for epoch in loader.epochs(2):
            for number, batch in enumerate(loader):
                loader.report(batch, *loss_of(batch["sample_id"], epoch))
                if epoch == 1:
                    first += batch["sample_id"].tolist()
                    if number == 1:
                        break
        state = json.loads(json.dumps(loader.state_dict()))
    with make(single_world(), tmp_path, importance=after, batch_size=batch_size) as loader:
        if message is None:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            rest = [i for batch in loader for i in batch["sample_id"].tolist() if i >= 0]
            assert (
                len(set(first + rest)) == len(first + rest) == loader.num_samples - state["hidden"]
            )
            return
        with pytest.raises(StateError, match=message):
            _go_on(loader, state)


def _go_on(loader, state):
    loader.load_state_dict(state)
    next(iter(loader))


def test_a_transform_that_returns_nothing_is_named(tmp_path):
    with (
        make(single_world(), tmp_path, transform=lambda sample, rng: None) as loader,
        pytest.raises(Exception, match="transform: returned NoneType"),
    ):
        next(iter(loader))


def test_the_training_data_can_be_evaluated_too(tmp_path):
    for _ in range(2):  # again: closing the loader has released the evaluation's cache
        with make(single_world(), tmp_path) as loader:
            evaluation = loader.evaluation(MemorySource(61))
            assert sum(int(batch["valid"].sum()) for batch in evaluation) == 61


def test_a_save_that_fails_is_named_and_keeps_what_was_saved(tmp_path, monkeypatch):
    with make(single_world(), tmp_path / "cache") as loader:
        loader.save(tmp_path / "saved")
        before = json.loads((tmp_path / "saved" / "state.json").read_text())
        next(iter(loader))
        full = OSError(errno.ENOSPC, "No space left on device")
        with monkeypatch.context() as patch:
            patch.setattr(dataio.state.snapshot, "write_table", Mock(side_effect=full))
            with pytest.raises(StateError, match=r"saved: .*No space left.*free some space"):
                loader.save(tmp_path / "saved")
        assert json.loads((tmp_path / "saved" / "state.json").read_text()) == before
        loader.save(tmp_path / "saved")
    with make(single_world(), tmp_path / "cache") as loader:
        loader.restore(tmp_path / "saved")
        assert loader.step == 1


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
        loader._parts.feedback.flush()
        scores, ids = (
            loader._parts.pool.scores["loss"],
            loader._parts.pool.cache.entries.sample_id[:],
        )
        assert (batch["slot"] < 0).any(), "the last batch holds padding"
        assert scores.tolist() == ids.astype(np.float32).tolist()


def test_a_save_in_the_middle_of_a_refresh_goes_on_there(tmp_path):
    kakurenbo = POLICIES["kakurenbo"]

    def until_refresh(loader):
        for epoch in loader.epochs(2):
            for batch in loader:
                loader.report(batch, *loss_of(batch["sample_id"], epoch))
            if epoch == 1:
                return
            list(loader.refresh())

    with make(single_world(), tmp_path / "a", importance=kakurenbo, batch_size=1) as loader:
        until_refresh(loader)
        whole = [digest(batch) for batch in loader.refresh()]
    assert len(whole) > 3
    with make(single_world(), tmp_path / "a", importance=kakurenbo, batch_size=1) as loader:
        until_refresh(loader)
        for number, _batch in enumerate(loader.refresh()):
            if number == 1:
                loader.save(tmp_path / "saved")
                break
    with make(single_world(), tmp_path / "a", importance=kakurenbo, batch_size=1) as loader:
        loader.restore(tmp_path / "saved")
        for _ in loader.epochs(2):
            assert list(loader) == []
            assert [digest(batch) for batch in loader.refresh()] == whole[2:]


def test_two_loaders_exchange_side_by_side(tmp_path):
    """Rank 0 draws from one first, rank 1 from the other: their messages must not meet."""

    def run(world):
        names = ("one", "other")
        loaders = [
            make(
                world,
                tmp_path,
                source=MemorySource(61, name=name),
                exchange=1.0,
                workers=Workers(threads=0),
            )
            for name in names
        ]
        order = loaders if world.rank == 0 else loaders[::-1]
        for epoch in range(3):
            for loader in loaders:
                loader.set_epoch(epoch)
            for loader in order:
                for batch in loader:
                    for data, i in zip(batch["data"], batch["sample_id"].tolist(), strict=True):
                        assert i < 0 or data == payload(i)
        owned = [loader._parts.pool.cache.entries.sample_id.tolist() for loader in loaders]
        for loader in loaders:
            loader.close()
        return owned

    first, second = run_threads(thread_worlds([1, 1], timeout_s=10), run)
    for one, two in zip(first, second, strict=True):
        assert sorted(one + two) == list(range(61))


@pytest.mark.parametrize("layout", [[1], [2, 1], [3, 2, 2]])
@pytest.mark.parametrize("batch_size", [1, 3, 5, 8])
def test_drop_last_gives_full_batches_alone_as_many_as_len_says(tmp_path, layout, batch_size):
    def run(world):
        with make(world, tmp_path, batch_size=batch_size, drop_last=True) as loader:
            epochs = []
            for _ in loader.epochs(2):
                batches = [batch["sample_id"].tolist() for batch in loader]
                assert len(batches) == len(loader) == loader.max_steps(1)
                epochs.append([i for batch in batches for i in batch])
            return epochs

    everyone = run_threads(thread_worlds(layout), run)
    for epoch in range(2):
        ids = [i for rank in everyone for i in rank[epoch]]
        assert min(ids) >= 0, "no padding"
        assert len(set(ids)) == len(ids)
        assert len(ids) == 61 // sum(layout) // batch_size * batch_size * sum(layout)


def test_overlapped_staging_orders_epoch_0_by_the_seed_alone(tmp_path):
    def order(root, stage):
        with make(single_world(), root, staging=Staging(when=stage)) as loader:
            return [
                [i for batch in loader for i in batch["sample_id"].tolist()]
                for _ in loader.epochs(2)
            ]

    cold, warm = (order(tmp_path / "a", "overlap") for _ in range(2))
    before = order(tmp_path / "b", "before")
    assert cold == warm
    assert cold[0] != before[0]
    assert cold[1] == before[1], "from epoch 1 on all rows are shuffled as one"
    assert len({i * 16 // 61 for i in cold[0][:5]}) <= 3, "the first rows are of the first groups"


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


def test_the_profiler_sees_waits_and_turns(tmp_path):
    with make(single_world(), tmp_path) as loader:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in loader.epochs(2):
                for _batch in loader:
                    pass
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["tonari: wait for a batch"] == 26
    assert counts["tonari: epoch turn"] == 1


def test_rows_that_arrived_are_checked_when_they_are_first_read(tmp_path):
    """The slots they took were checked in the epoch before, with other rows in them."""

    def run(world):
        source = MemorySource(60)  # halved evenly: every row leaves
        with make(
            world, tmp_path, source=source, exchange=1.0, workers=Workers(threads=0)
        ) as loader:
            for epoch in loader.epochs(2):
                if epoch == 1:
                    cache = loader._parts.pool.cache
                    cache.fixed[0].rows[cache.entries.position[:], 0] ^= 0x40
                for batch in loader:
                    valid = batch["slot"] >= 0
                    assert torch.equal(batch["label"][valid], batch["sample_id"][valid] % 10)

    run_threads(thread_worlds([1, 1]), run)


def test_a_checkpoint_is_never_ahead_of_the_caches(tmp_path, monkeypatch):
    """The manifest that is written beside training is there before anything is saved."""
    write_head, settle, save = (
        CommitLog.write_head,
        Cache.await_commit,
        dataio.state.snapshot.save_snapshot,
    )
    asked = threading.Event()
    heads: list[int] = []

    def late(self, head, **options):
        if head.epoch == 1:
            assert asked.wait(10)
        write_head(self, head, **options)

    def settled(self):
        if self.epoch == 1:
            asked.set()
        settle(self)

    def saved(path, state, node, world, **more):
        world.barrier(doing="look at the manifests")
        heads.extend(json.loads(p.read_text())["epoch"] for p in tmp_path.rglob("manifest.json"))
        save(path, state, node, world, **more)

    monkeypatch.setattr(CommitLog, "write_head", late)
    monkeypatch.setattr(Cache, "await_commit", settled)
    monkeypatch.setattr("dataio.loader.save_snapshot", saved)

    def run(world):
        with make(world, tmp_path) as loader:
            for epoch in loader.epochs(3):
                if epoch == 1:
                    loader.save(tmp_path / "saved")
                    return
                list(loader)

    run_threads(thread_worlds([1, 1]), run)
    assert heads == [1] * 4
