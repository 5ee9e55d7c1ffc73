import numpy as np
import pytest
import torch

import shuffle
from dataio import Loader, Reports, Staging, Workers
from dataio.world import run_threads, single_world, thread_worlds
from tests.cases import diagonal
from tests.dataio.loaders import EPOCHS, POLICIES, digest, loss_of, make, train
from tests.memory_source import FIELDS, MemorySource, payload


@diagonal(layout=[[1], [2, 2], [3, 1], [3, 2, 2]], policy=POLICIES)
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
            return seen, loader._session.pool.scores.copy()

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


def test_a_batch_larger_than_a_share_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"batch_size: 64 is more than a replica's share of 61 rows.*at most"
    ):
        make(single_world(), tmp_path, batch_size=64)


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_batch_without_rows_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match=f"batch_size is {wrong}, expected a whole number >= 1"):
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


def test_the_training_data_can_be_evaluated_too(tmp_path):
    for _ in range(2):  # again: closing the loader has released the evaluation's cache
        with make(single_world(), tmp_path) as loader:
            evaluation = loader.evaluation(MemorySource(61))
            assert sum(int(batch["valid"].sum()) for batch in evaluation) == 61


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
        owned = [loader._session.pool.cache.entries.sample_id.tolist() for loader in loaders]
        for loader in loaders:
            loader.close()
        return owned

    first, second = run_threads(thread_worlds([1, 1], timeout_s=10), run)
    for one, two in zip(first, second, strict=True):
        assert sorted(one + two) == list(range(61))


@diagonal(layout=[[1], [2, 1], [3, 2, 2]], batch_size=[1, 3, 5, 8])
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


def test_the_profiler_sees_waits_and_turns(tmp_path):
    with make(single_world(), tmp_path) as loader:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in loader.epochs(2):
                list(loader)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["tonari: wait for a batch"] == 26
    assert counts["tonari: epoch end"] == 1
