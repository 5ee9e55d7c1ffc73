"""Shards appended to a source extend the run at the next epoch, and exactly from there on."""

import pytest

from dataio import Mixture
from dataio.world import run_threads, single_world, thread_worlds
from importance import InfoBatch, Weighted
from tests.cases import diagonal
from tests.dataio.growing.shards import (
    EPOCHS,
    GROWTH,
    HIDES,
    SHUFFLES,
    Directory,
    grow,
    make,
    samples_of,
    train,
)
from tests.dataio.loaders import loss_of

pytestmark = pytest.mark.thorough
WORLDS = [(1,), (1, 1), (2, 1), (2, 2), (1, 1, 1, 1)]


def whole_run(tmp_path, name, replicas, *, saves=(), directory=None, root="whole", **options):
    """A run that grows; what each rank saw, and when it saved."""
    directory = directory or Directory(tmp_path / "shards")

    def whole(world):
        saved = {}
        with make(world, tmp_path / root, directory.path, name, **options) as loader:
            append = grow(world, directory)

            def on_step(epoch, step, number):
                append(epoch, step, number)
                if step in saves:
                    loader.save(tmp_path / f"at-{epoch}-{step}")
                    saved[epoch, step] = number

            return train(loader, on_step=on_step), saved

    return run_threads(thread_worlds(list(replicas), timeout_s=20), whole)


def lengths():
    """The samples of each epoch."""
    counts = [61]
    for epoch in range(EPOCHS - 1):
        counts.append(counts[-1] + GROWTH.get(epoch, 0))
    return counts


@diagonal(replicas=WORLDS, name=SHUFFLES)
def test_each_epoch_is_of_the_samples_that_were_there_when_it_began(tmp_path, name, replicas):
    results = [seen for seen, _ in whole_run(tmp_path, name, replicas)]
    for epoch, count in enumerate(lengths()):
        assert samples_of(results, epoch) == list(range(count)), f"epoch {epoch}"
    steps = [[at for at, *_ in seen] for seen in results]
    assert all(each == steps[0] for each in steps)


@diagonal(replicas=[(1,), (1, 1), (2, 2)], name=SHUFFLES)
def test_shards_appended_after_a_checkpoint_do_not_change_its_epoch(tmp_path, name, replicas):
    """Killed in the epoch in which shards came, and before; the rest of that epoch is the same."""
    results = whole_run(tmp_path, name, replicas, saves=(1,))
    counts = lengths()
    for epoch in range(EPOCHS):

        def rest(world, epoch=epoch):
            with make(world, tmp_path / "whole", tmp_path / "shards", name) as loader:
                loader.restore(tmp_path / f"at-{epoch}-1")
                assert loader.num_samples == counts[epoch]
                return train(loader)

        ends = run_threads(thread_worlds(list(replicas), timeout_s=20), rest)
        for (seen, saved), end in zip(results, ends, strict=True):
            same = [batch for batch in seen[saved[epoch, 1] :] if batch[0] == epoch]
            assert [batch for batch in end if batch[0] == epoch] == same
        for later in range(epoch + 1, EPOCHS):
            assert samples_of(ends, later) == list(range(counts[-1]))


@pytest.mark.parametrize("name", SHUFFLES)
def test_excluded_samples_stay_out_as_the_source_grows_and_new_ones_come(tmp_path, name):
    excluded = list(range(0, 60, 7))
    results = whole_run(tmp_path, name, (1, 1), saves=(1,), exclude=excluded)
    counts = lengths()
    for epoch, count in enumerate(counts):
        wanted = sorted(set(range(count)) - set(excluded))
        assert samples_of([seen for seen, _ in results], epoch) == wanted
    # Some of the longer list are of shards that an earlier epoch did not have
    longer = [*excluded, counts[-1] - 1, 3]

    def rest(world):
        with make(world, tmp_path / "whole", tmp_path / "shards", name, exclude=longer) as loader:
            loader.restore(tmp_path / "at-0-1")
            return train(loader)

    ends = run_threads(thread_worlds([1, 1], timeout_s=20), rest)
    assert not set(samples_of(ends, 0)) & set(longer)
    for epoch in range(1, EPOCHS):
        assert samples_of(ends, epoch) == sorted(set(range(counts[-1])) - set(longer))


POLICIES = {
    "kakurenbo": HIDES,
    "infobatch": InfoBatch(0.5),
    "weighted": Weighted("label"),
    "balanced": Weighted(balance="label", num_samples=80),
}


@diagonal(policy=POLICIES, name=["local", "partial", "global"])
def test_policies_go_on_over_old_and_new_rows(tmp_path, name, policy):
    """The scores of old rows stay, new rows are as never seen; a save gives the same again."""
    results = whole_run(tmp_path, name, (2, 1), saves=(2,), importance=POLICIES[policy])
    if policy in ("kakurenbo", "infobatch"):
        found = samples_of([seen for seen, _ in results], 4)
        assert 61 + 13 <= max(found) < lengths()[-1]
        assert len(found) == len(set(found)) < lengths()[-1]
        # Rows without a score are not hidden.
        assert set(range(74, 96)) <= set(found)

    def rest(world):
        chosen = POLICIES[policy]
        with make(world, tmp_path / "new", tmp_path / "shards", name, importance=chosen) as loader:
            loader.restore(tmp_path / "at-3-2")
            return train(loader)

    ends = run_threads(thread_worlds([2, 1], timeout_s=20), rest)
    for (seen, saved), end in zip(results, ends, strict=True):
        assert end == seen[saved[3, 2] :]


def test_scores_of_old_rows_stay(tmp_path):
    directory = Directory(tmp_path / "shards")

    def run(world):
        with make(world, tmp_path / "cache", directory.path, importance=HIDES) as loader:
            for epoch in loader.epochs(3):
                if epoch:
                    pool = loader._session.pool
                    is_new = pool.sample_ids >= 61 + (10 if epoch == 2 else 0)
                    assert (pool.scores["epoch"][is_new] < 0).all()
                    assert (pool.scores["epoch"][~is_new] >= 0).all()
                for batch in loader:
                    loader.report(batch, *loss_of(batch["sample_id"], epoch))
                for batch in loader.refresh():
                    loader.report(batch, *loss_of(batch["sample_id"], epoch))
                if world.rank == 0:
                    directory.append(10)

    run_threads(thread_worlds([1, 1], timeout_s=20), run)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["local", "partial"])
def test_a_growth_reads_and_moves_new_rows_alone(tmp_path, name):
    """Old rows stay in their slots, none comes from another node or from the source again."""
    directory = Directory(tmp_path / "shards")

    def run(world):
        with make(world, tmp_path / "cache", directory.path, name) as loader:
            for _ in loader.epochs(2):
                list(loader)
                if world.rank == 0 and directory.num_shards == 2:
                    directory.append(20)
                    # Counting and staging: so much of the old shards cannot be read.
                before = loader.stats()
            after, written = loader.stats(), loader._session.pool.cache.num_slots
            assert after["pulled_rows"] == before["pulled_rows"] == 0
            assert after["source_bytes"] <= before["source_bytes"] + 3 * path.stat().st_size
            return written

    path = tmp_path / "shards" / "shard-002.tar"
    assert sum(run_threads(thread_worlds([1, 1], timeout_s=20), run)) == 81


@diagonal(replicas=[(1,), (1, 1)], name=["local", "partial"])
def test_under_a_quota_rows_beyond_it_are_read_from_the_source(tmp_path, name, replicas):
    results = whole_run(tmp_path, name, replicas)
    tight = whole_run(tmp_path / "tight", name, replicas, quota="150kB", batch_size=5, root="tight")
    assert [seen for seen, _ in tight] == [seen for seen, _ in results]


def test_growth_is_announced_once_on_rank_0(tmp_path, caplog):
    caplog.set_level("INFO", logger="dataio.run_state")
    whole_run(tmp_path, "partial", (1, 1))
    told = [record.getMessage() for record in caplog.records if "grew" in record.getMessage()]
    assert [line.split(": ", 1)[1] for line in told] == [
        "grew by 1 shard with 13 samples to 74 samples, from epoch 2 on",
        "grew by 1 shard with 22 samples to 96 samples, from epoch 4 on",
    ]


def test_a_loop_over_the_loader_grows_too_and_set_epoch_goes_back(tmp_path):
    directory = Directory(tmp_path / "shards")
    with make(single_world(), tmp_path / "cache", directory.path) as loader:
        first = [batch["sample_id"].tolist() for batch in loader]
        directory.append(9)
        second = [batch["sample_id"].tolist() for batch in loader]
        assert loader.num_samples == 70
        loader.set_epoch(0)
        assert [batch["sample_id"].tolist() for batch in loader] == first
        assert loader.num_samples == 61
        assert [batch["sample_id"].tolist() for batch in loader] == second
        loader.set_epoch(1)
        loader.set_epoch(2)
        assert sorted(i for batch in loader for i in batch["sample_id"].tolist() if i >= 0) == list(
            range(70)
        )


def test_an_evaluation_stays_as_it_was(tmp_path):
    directory, held_out = Directory(tmp_path / "shards"), Directory(tmp_path / "val")
    with make(single_world(), tmp_path / "cache", directory.path) as loader:
        evaluation = loader.evaluation(str(held_out.path / "*.tar"))
        for _ in loader.epochs(3):
            list(loader)
            directory.append(10)
            held_out.append(10)
            found = [i for batch in evaluation for i in batch["sample_id"][batch["valid"]].tolist()]
            assert sorted(found) == list(range(61))


def test_a_mixture_of_a_loader_that_grows_takes_its_steps(tmp_path):
    directory = Directory(tmp_path / "shards")
    with make(single_world(), tmp_path / "cache", directory.path) as loader:
        with pytest.raises(ValueError, match="give steps="):
            Mixture({"grows": loader}, {"grows": 1})
        mixture = Mixture({"grows": loader}, {"grows": 1}, steps=13)
        found = []
        for _ in mixture.epochs(3):
            found.append([i for batch in mixture for i in batch["sample_id"].tolist() if i >= 0])
            if directory.num_shards == 2:
                directory.append(4)
        assert [max(ids) for ids in found] == [60, 64, 64]


def test_shards_that_another_job_added_while_none_ran_come_with_the_next_epoch(tmp_path):
    directory = Directory(tmp_path / "shards")
    with make(single_world(), tmp_path / "cache", directory.path) as loader:
        list(loader)
        loader.save(tmp_path / "save")
    directory.append(10)
    with make(single_world(), tmp_path / "cache", directory.path) as loader:
        loader.restore(tmp_path / "save")
        assert loader.num_samples == 61
        list(loader)
        assert loader.num_samples == 71
        # What was staged and counted is not read again.
        shard = tmp_path / "shards" / "shard-002.tar"
        assert loader.stats()["source_bytes"] <= 4 * shard.stat().st_size


def test_a_quota_that_keeps_no_row_reads_old_and_new_ones_in_each_epoch(tmp_path):
    directory = Directory(tmp_path / "shards")
    with make(single_world(), tmp_path / "cache", directory.path, quota="150kB") as loader:
        for epoch, count in enumerate((61, 71)):
            before = loader.stats()["streamed_rows"]
            ids = [i for batch in loader for i in batch["sample_id"].tolist() if i >= 0]
            assert sorted(ids) == list(range(count))
            resident = loader.stats()["resident_fraction"]
            assert resident < 1, f"epoch {epoch}"
            # Padding repeats rows.
            assert loader.stats()["streamed_rows"] - before >= round((1 - resident) * count)
            directory.append(10)
