"""Iterating again is the next epoch, as with a `DataLoader`, and the same one as by `epochs`."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from dataio import Mixture, StateError, Workers
from dataio.world import run_threads, single_world, thread_worlds
from importance import Kakurenbo, RandomPrune
from tests.dataio.loaders import digest, jitter, loss_of, make
from tests.memory_source import MemorySource

EPOCHS = 3
POLICIES = {
    "off": None,
    # Neither needs the length of the run, which a plain loop does not tell.
    "kakurenbo": Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0),
    "random": RandomPrune(0.25, delta=1.0),
}


def epoch_of(loader, epoch):
    """Train an epoch and refresh: all that there is to tell of it."""
    seen = []
    for batch in loader:
        loader.report(batch, *loss_of(batch["sample_id"], epoch))
        seen.append(digest(batch))
    assert len(seen) == len(loader)
    for batch in loader.refresh():
        loader.report(batch, *loss_of(batch["sample_id"], epoch + 0.5))
        seen.append(digest(batch))
    return [loader.epoch, loader.lr_factor, loader.order_hash(), *seen]


def ended(loader):
    loader.flush()
    return {**loader.state_dict(), "scores": np.array(loader._session.pool.scores).tolist()}


def plain(loader, epochs=EPOCHS):
    return [epoch_of(loader, loader_epoch) for loader_epoch in range(epochs)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plain_loop_trains_what_epochs_would(tmp_path, policy):
    def run(world, root, loop):
        with make(world, root, importance=POLICIES[policy], transform=jitter) as loader:
            seen = loop(loader)
            return seen, ended(loader), loader.stats()["exchanged_rows"]

    def by_epochs(loader):
        # One more than is trained: the last epoch's exchange begins, as where nobody knows the end.
        turns = loader.epochs(EPOCHS + 1)
        return [epoch_of(loader, next(turns)) for _ in range(EPOCHS)]

    found = run_threads(thread_worlds([1, 1]), lambda world: run(world, tmp_path / "a", plain))
    wanted = run_threads(thread_worlds([1, 1]), lambda world: run(world, tmp_path / "b", by_epochs))
    assert found == wanted
    for seen, _, exchanged in found:
        assert [epoch[0] for epoch in seen] == list(range(EPOCHS))
        assert len({epoch[2] for epoch in seen}) == EPOCHS, "each epoch has its own order"
        assert exchanged > 0


@pytest.mark.parametrize("steps", [0, 3, "all"])
def test_a_plain_loop_goes_on_where_it_was_saved(tmp_path, steps):
    """After some steps of epoch 1, or at its end: then the next iteration is epoch 2."""
    policy = POLICIES["kakurenbo"]

    def whole(world):
        with make(world, tmp_path / "whole", importance=policy) as loader:
            return plain(loader)

    def first_part(world):
        with make(world, tmp_path / "part", importance=policy) as loader:
            epoch_of(loader, 0)
            if steps == "all":
                epoch_of(loader, 1)
            elif steps:
                for batch in itertools.islice(loader, steps):
                    loader.report(batch, *loss_of(batch["sample_id"], 1))
            loader.save(tmp_path / "saved")

    def rest(world):
        with make(world, tmp_path / "part", importance=policy) as loader:
            loader.restore(tmp_path / "saved")
            seen = []
            for epoch in range(loader.epoch + (loader.step > 0 and steps != 3), EPOCHS):
                seen += [digest(batch) for batch in reported(loader, epoch)]
            return seen

    def reported(loader, epoch):
        for batch in loader:
            loader.report(batch, *loss_of(batch["sample_id"], epoch))
            yield batch
        for batch in loader.refresh():
            loader.report(batch, *loss_of(batch["sample_id"], epoch + 0.5))
            yield batch

    worlds = thread_worlds([1, 1])
    wanted = run_threads(worlds, whole)
    run_threads(thread_worlds([1, 1]), first_part)
    found = run_threads(thread_worlds([1, 1]), rest)
    for mine, all_of_it in zip(found, wanted, strict=True):
        flat = [seen for epoch in all_of_it for seen in epoch[3:]]
        assert mine == flat[len(flat) - len(mine) :]
        skipped = {0: 1, 3: 1, "all": 2}[steps]
        done = sum(len(epoch) - 3 for epoch in all_of_it[:skipped])
        assert len(mine) == len(flat) - done - (steps if steps == 3 else 0)


def test_the_small_state_at_an_epochs_end_goes_on_with_the_next(tmp_path):
    with make(single_world(), tmp_path) as loader:
        wanted = plain(loader, 3)
    with make(single_world(), tmp_path) as loader:
        plain(loader, 2)
        state = json.dumps(loader.state_dict())
    with make(single_world(), tmp_path) as loader:
        loader.load_state_dict(json.loads(state))
        assert epoch_of(loader, 2) == wanted[2]


def test_a_loop_broken_off_goes_on_with_the_rest(tmp_path):
    """In a plain loop and inside `epochs` alike: each sample comes once an epoch."""
    with make(single_world(), tmp_path) as loader:
        wanted = plain(loader, 2)
    with make(single_world(), tmp_path) as loader:
        first = [digest(batch) for batch in itertools.islice(loader, 5)]
        rest = [digest(batch) for batch in loader]
        assert first + rest == wanted[0][3:]
        assert [digest(batch) for batch in loader] == wanted[1][3:]
    with make(single_world(), tmp_path) as loader:
        for epoch in loader.epochs(2):
            seen = [digest(batch) for batch in itertools.islice(loader, 5)]
            assert seen + [digest(batch) for batch in loader] == wanted[epoch][3:]


def test_a_second_pass_inside_epochs_says_what_to_do(tmp_path):
    with make(single_world(), tmp_path) as loader:
        for epoch in loader.epochs(2):
            assert len(list(loader)) == len(loader)
            with pytest.raises(
                StateError,
                match=rf"epoch {epoch} has no batch left.*one loop over the loader.*leave epochs",
            ):
                next(iter(loader))
        # Nothing leads any more.
        assert len(list(loader)) == len(loader)
        assert loader.epoch == 2


def test_inside_epochs_an_epoch_restored_at_its_end_has_no_batch_and_no_error(tmp_path):
    policy = POLICIES["kakurenbo"]
    with make(single_world(), tmp_path / "c", importance=policy) as loader:
        for _ in range(2):
            for batch in loader:
                loader.report(batch, *loss_of(batch["sample_id"], loader.epoch))
        loader.save(tmp_path / "saved")
    with make(single_world(), tmp_path / "c", importance=policy) as loader:
        loader.restore(tmp_path / "saved")
        turns = loader.epochs(3)
        assert next(turns) == 1
        assert list(loader) == []
        assert len(list(loader.refresh())) > 0


def test_with_set_epoch_each_epoch_is_the_one_asked_for(tmp_path):
    with make(single_world(), tmp_path) as loader:
        wanted = plain(loader, 3)
    with make(single_world(), tmp_path) as loader:
        for epoch in [0, 1, 1, 2]:
            loader.set_epoch(epoch)
            assert epoch_of(loader, epoch) == wanted[epoch]
        loader.set_epoch(0)
        assert epoch_of(loader, 0) == wanted[0]
        assert epoch_of(loader, 1) == wanted[1]


def test_an_evaluation_is_the_same_set_again(tmp_path):
    with make(single_world(), tmp_path) as loader:
        evaluation = loader.evaluation(MemorySource(23, name="val"))
        passes = [[digest(batch) for batch in evaluation] for _ in range(2)]
    assert passes[0] == passes[1]


def test_a_mixture_begins_its_next_epoch_too(tmp_path):
    def mixture():
        loaders = {
            name: make(single_world(), tmp_path / name, source=MemorySource(size, name=name))
            for name, size in (("web", 40), ("code", 25))
        }
        return Mixture(loaders, {"web": 2, "code": 1}, steps=7)

    def seen(batch):
        return digest({"sample_id": batch["sample_id"]})

    with mixture() as mixed:
        wanted = [[seen(batch) for batch in mixed] for _ in mixed.epochs(3)]
    with mixture() as mixed:
        assert [[seen(batch) for batch in mixed] for _ in range(3)] == wanted
        assert mixed.epoch == 2
    with mixture() as mixed:
        for _ in mixed.epochs(2):
            assert len(list(mixed)) == 7
            with pytest.raises(StateError, match=r"Mixture: epoch \d has no batch left"):
                next(iter(mixed))


def _mixture(root):
    loaders = {
        name: make(single_world(), root / name, source=MemorySource(40, name=name))
        for name in ("web", "code")
    }
    return Mixture(loaders, {"web": 1, "code": 1}, steps=8)


@contextmanager
def _opened(root, kind):
    """Open something that is iterated, and show the ids that one loop over all of it gives."""
    if kind == "mixture":
        with _mixture(root) as mixture:
            yield mixture
    else:
        processes = kind.endswith("processes")
        workers = Workers(processes=1) if processes else Workers(threads=2)
        transform = jitter if processes else None
        with make(
            single_world(), root, source=MemorySource(60), workers=workers, transform=transform
        ) as loader:
            if kind.startswith("evaluation"):
                yield loader.evaluation(MemorySource(64, name="val"), transform=transform)
            else:
                yield loader


KINDS = ["loader", "loader processes", "evaluation", "evaluation processes", "mixture"]


def _rows(batch):
    return [(batch.get("dataset", ""), row) for row in batch["sample_id"].tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_two_loops_at_once_are_refused_and_no_batch_comes_twice(tmp_path, kind):
    refused = (
        r"(?i)its loop was broken off, as another loop began.*one loop at a time.*make another"
    )
    with _opened(tmp_path, kind) as batches:
        pairs = zip(batches, batches, strict=True)
        seen = [*next(pairs)]
        with pytest.raises(StateError, match=refused):
            next(pairs)
        older = iter(batches)
        seen.append(next(older))
        seen += batches  # all that is left
        with pytest.raises(StateError, match=refused):
            next(older)
        if not kind.startswith("evaluation"):  # each loop over that one is a whole pass
            rows = [row for batch in seen for row in _rows(batch)]
            assert len(rows) == len(set(rows)) == (40 if kind == "mixture" else 60)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_loop_that_was_left_changes_nothing_of_the_next(tmp_path, kind):
    with _opened(tmp_path, kind) as batches:
        older = iter(batches)
        seen = [next(older)]
        later = iter(batches)
        seen.append(next(later))
        del older
        seen += later
        assert len(seen) == len(batches) + kind.startswith("evaluation")


def test_two_threads_over_one_loader_are_refused(tmp_path):
    entered, leave = threading.Event(), threading.Event()

    def wait(sample, rng):
        entered.set()
        assert leave.wait(60)
        return sample

    with make(single_world(), tmp_path, source=MemorySource(60), transform=wait) as loader:
        with ThreadPoolExecutor(1) as other:
            taken = other.submit(lambda: next(iter(loader)))
            assert entered.wait(60)
            with pytest.raises(StateError, match="another thread or a transform is taking one"):
                next(iter(loader))
            leave.set()
            first = taken.result(60)["sample_id"].tolist()
        rest = [row for batch in loader for row in batch["sample_id"].tolist()]
        assert len(set(first + rest)) == len(first + rest) == loader.num_samples


@pytest.mark.parametrize("change", ["set_epoch", "load_state_dict", "restore", "skip", "refresh"])
def test_a_loop_whose_place_was_changed_is_refused(tmp_path, change):
    with make(single_world(), tmp_path / "c", importance=POLICIES["kakurenbo"]) as loader:
        for batch in loader:
            loader.report(batch, *loss_of(batch["sample_id"], 0))
        loop = iter(loader)
        next(loop)
        loader.save(tmp_path / "saved")
        {
            "set_epoch": lambda: loader.set_epoch(5),
            "load_state_dict": lambda: loader.load_state_dict(loader.state_dict()),
            "restore": lambda: loader.restore(tmp_path / "saved"),
            "skip": lambda: loader.skip(1),
            "refresh": lambda: list(loader.refresh()),
        }[change]()
        with pytest.raises(StateError, match="refresh, skip, set_epoch"):
            next(loop)
