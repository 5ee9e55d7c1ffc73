"""Transforms that draw from torch's, NumPy's or Python's global generator, as libraries' do."""

import itertools
import logging
import random  # noqa: TID251
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from dataio import Workers
from dataio.world import single_world
from tests.dataio.loaders import digest, make
from tests.memory_source import MemorySource

# What runs in a process stands at module level, where it is found again.


def by_torch(sample, rng):
    return sample | {"drawn": torch.rand(2)}


def by_numpy(sample, rng):
    return sample | {"drawn": np.random.rand(2)}  # noqa: NPY002


def by_python(sample, rng):
    return sample | {"drawn": random.random()}


def by_all(sample, rng):
    drawn = [float(torch.rand(1)), np.random.rand(), random.random(), rng.random()]  # noqa: NPY002
    return sample | {"drawn": np.array(drawn)}


def by_rng(sample, rng):
    return sample | {"drawn": rng.random(2)}


def mixed(batch, rng):
    """As torchvision's MixUp: of the whole batch."""
    return batch | {"mix": torch.rand(len(batch["slot"]))}


def collated(samples):
    return {"label": torch.tensor([int(s["label"]) for s in samples]), "mix": torch.rand(3)}


def run(tmp_path, *, epochs=2, skip=0, state=None, **options):
    """A run's batches, and the state after ``skip`` of them."""
    torch.manual_seed(0)
    with make(single_world(), tmp_path / "cache", **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        batches = (batch for _ in loader.epochs(epochs) for batch in loader)
        begun = [digest(batch) for batch in itertools.islice(batches, skip)]
        kept = loader.state_dict()
        return begun + [digest(batch) for batch in batches], kept


USES: dict[str, dict[str, Any]] = {
    "torch": {"transform": by_torch},
    "numpy": {"transform": by_numpy},
    "python": {"transform": by_python},
    "all": {"transform": by_all},
    "batch": {"batch_transform": mixed},
    "collate": {"collate": collated},
    "both": {"transform": by_all, "batch_transform": mixed},
}


@pytest.mark.parametrize("use", USES)
def test_the_same_batches_for_any_number_of_threads_and_after_a_restart(tmp_path, use):
    wanted, state = run(tmp_path, skip=5, workers=Workers(threads=2), **USES[use])
    assert len(set(wanted)) == len(wanted)
    for num_threads in (0, 1, 4):
        assert run(tmp_path, workers=Workers(threads=num_threads), **USES[use])[0] == wanted
    rest, _ = run(tmp_path, state=state, workers=Workers(threads=3), **USES[use])
    assert rest == wanted[5:]


def test_processes_draw_what_threads_draw(tmp_path):
    wanted, _ = run(tmp_path, epochs=1, workers=Workers(threads=2), transform=by_all)
    assert run(tmp_path, epochs=1, workers=Workers(processes=2), transform=by_all)[0] == wanted


@pytest.mark.parametrize("use", ["all", "batch", "both"])
def test_the_users_own_draws_are_left_alone(tmp_path, use):
    """What the training loop draws between batches is what it would draw without a loader."""

    def draws():
        return float(torch.rand(1)), float(np.random.rand()), random.random()  # noqa: NPY002

    def seed():
        torch.manual_seed(3)
        np.random.seed(3)  # noqa: NPY002
        random.seed(3)

    with make(
        single_world(), tmp_path / "cache", workers=Workers(threads=2), **USES[use]
    ) as loader:
        seed()
        found = [draws() for _ in loader]
        seed()
        assert found == [draws() for _ in found]


def told(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.endswith("dataio.batch.watch")
    ]


def test_it_is_told_once_with_the_cure(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run(tmp_path, transform=by_all, batch_transform=mixed)
    (of_batch,) = [line for line in told(caplog) if line.startswith("batch_transform")]
    (of_sample,) = [line for line in told(caplog) if line.startswith("transform")]
    assert "torch, numpy, random" in of_sample
    assert "draw from its rng instead, or run it in processes: Workers(processes=...)" in of_sample
    assert "draws from the global generators of torch;" in of_batch


def test_who_draws_from_rng_is_told_nothing_and_runs_on_threads(tmp_path, caplog):
    threads: Counter[str] = Counter()

    def noted(sample, rng):
        threads[threading.current_thread().name.split("_")[0]] += 1
        return by_rng(sample, rng)

    source = MemorySource(400)
    with caplog.at_level(logging.WARNING):
        run(
            tmp_path,
            epochs=1,
            transform=noted,
            workers=Workers(threads=2),
            batch_size=20,
            source=source,
        )
    assert told(caplog) == []
    assert threads["tonari-decode"] > 0.85 * threads.total()


def test_draws_that_begin_late_are_noticed_and_told(tmp_path, caplog):
    def sometimes(sample, rng):
        drawn = float(torch.rand(1)) if begun else 0.0
        return sample | {"drawn": drawn}

    begun = []
    with (
        caplog.at_level(logging.WARNING),
        make(single_world(), tmp_path, transform=sometimes, workers=Workers(threads=2)) as loader,
    ):
        for step, _ in enumerate(itertools.chain(loader, loader, loader)):
            if step == 3:
                begun.append(True)
    (line,) = told(caplog)
    assert "batches before it" in line


class Own:
    """A library's transform with a generator of its own, seeded from the clock or not at all."""

    def __init__(self):
        self.random = random.Random()

    def __call__(self, sample, rng):
        return sample | {"drawn": self.random.random()}


def test_random_state_of_its_own_is_noticed_and_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run(tmp_path, transform=Own(), workers=Workers(threads=2))
    (line,) = told(caplog)
    assert line.startswith("transform: gives another result for the same sample and rng")
