"""How much of a run is done: a schedule by it ends where the run ends."""

import contextlib
from itertools import pairwise

import pytest

from dataio import Loader, Reports, StateError, Workers
from dataio.world import run_threads, single_world, thread_worlds
from importance import Kakurenbo, RandomPrune
from tests.dataio.loaders import loss_of
from tests.memory_source import FIELDS, MemorySource


def make(world, root, *, importance=None, batch_size=4, num_samples=61, **options):
    return Loader(
        MemorySource(num_samples),
        batch_size=batch_size,
        fields=FIELDS,
        cache=root,
        importance=importance,
        world=world,
        workers=Workers(threads=0),
        reports=Reports(progress=False),
        **options,
    )


def test_progress_grows_evenly_to_the_end_of_each_epoch_and_of_the_run(tmp_path):
    with make(single_world(), tmp_path) as loader:
        for epoch in loader.epochs(3):
            assert loader.progress == pytest.approx(epoch / 3)
            seen = [(loader.step, loader.progress) for _ in loader]
            assert [step for step, _ in seen] == list(range(1, 17))
            for step, progress in seen:
                assert progress == pytest.approx((epoch + step / 16) / 3)
        assert loader.progress == 1.0


@pytest.mark.parametrize(
    "policy", [RandomPrune(0.5, delta=0.7), Kakurenbo(0.4, drops=(), alphas=(1.0,))]
)
def test_progress_stays_right_where_epochs_get_shorter_and_is_the_same_on_every_rank(
    tmp_path, policy
):
    def job(world):
        seen, lengths = [], []
        with make(world, tmp_path, importance=policy, batch_size=3) as loader:
            for epoch in loader.epochs(5):
                lengths.append(len(loader))
                for batch in loader:
                    loader.report(batch, *loss_of(batch["sample_id"], epoch))
                    seen.append(loader.progress)
                assert loader.progress == pytest.approx((epoch + 1) / 5)
        return seen, lengths

    found = run_threads(thread_worlds([1, 2]), job)
    assert all(theirs == found[0] for theirs in found)
    seen, lengths = found[0]
    assert len(set(lengths)) > 1, "epochs got shorter"
    assert all(before < after for before, after in pairwise(seen))
    assert seen[-1] == 1.0


@pytest.mark.parametrize("batch_size", [4, 7, 2])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("call", ["restore", "load_state_dict"])
def test_progress_goes_on_after_a_restore_in_the_middle_of_an_epoch(
    tmp_path, batch_size, replicas, call
):
    with make(single_world(), tmp_path / "a") as loader:
        for epoch in loader.epochs(3):
            for _ in loader:
                if (epoch, loader.step) == (1, 6):
                    break
            if epoch == 1:
                break
        before = loader.progress
        loader.save(tmp_path / "saved")
        state = loader.state_dict()
    assert before == pytest.approx((1 + 6 / 16) / 3)

    def job(world):
        with make(world, tmp_path / "b", batch_size=batch_size) as loader:
            getattr(loader, call)(tmp_path / "saved" if call == "restore" else state)
            seen = []
            for epoch in loader.epochs(3):
                seen += [loader.progress]
                seen += [loader.progress for _ in loader]
                assert loader.progress == pytest.approx((epoch + 1) / 3)
            return seen

    found = run_threads(thread_worlds([replicas]), job)
    assert all(theirs == found[0] for theirs in found)
    seen = found[0]
    assert seen[0] == pytest.approx(before, abs=0.01)
    assert seen[1] > before
    assert all(earlier <= later for earlier, later in pairwise(seen))
    assert seen[-1] == 1.0


def test_where_the_number_of_epochs_is_not_known_progress_says_so(tmp_path):
    with make(single_world(), tmp_path) as loader:
        next(iter(loader))
        with pytest.raises(StateError, match=r"epoch 0 the number of epochs.*loader\.epochs\(n\)"):
            _ = loader.progress


def test_a_run_of_no_epochs_or_past_its_end_is_done(tmp_path):
    with make(single_world(), tmp_path) as loader:
        assert list(loader.epochs(0)) == []
        assert loader.progress == 1.0
        loader.set_epoch(7)
        assert list(loader.epochs(3)) == []
        assert loader.progress == 1.0


@pytest.mark.parametrize("steps", [None, 3, 99])
@pytest.mark.parametrize("restored", [False, True])
def test_no_property_talks_to_other_ranks(tmp_path, monkeypatch, steps, restored):
    names = [name for name, its in vars(Loader).items() if isinstance(its, property)]
    assert {"epoch", "lr_factor", "progress"} < set(names)

    def alone(*given, **more):
        raise AssertionError("a property talks to other ranks")

    def job(world):
        with make(world, tmp_path / "cache") as loader:
            if steps is not None:
                next(loader.epochs(2))
                list(zip(range(steps), loader, strict=False))
            if restored:
                loader.load_state_dict(loader.state_dict())
            world.barrier(doing="before")
            with monkeypatch.context() as patch:
                if world.rank == 0:
                    patch.setattr(world._collectives, "combine", alone)
                    patch.setattr(world, "isend", alone)
                for name in names:
                    with contextlib.suppress(StateError):
                        getattr(loader, name)
            world.barrier(doing="after")

    run_threads(thread_worlds([1, 1]), job)
