"""A batch that was trained is made again in one process: bytes, crops, transforms and padding."""

import numpy as np
import pytest
import torch

from dataio import Image, Int, Reports, StateError
from dataio.rows.views import RandomResizedCrop
from dataio.world import run_threads, single_world, thread_worlds
from importance import Weighted
from tests.dataio.loaders import ImageSource, jitter, make, scramble

FIELDS = {"image": Image("png", crop=RandomResizedCrop(4), flip=0.5), "label": Int("cls")}
NUM_SAMPLES = 43


def options(root, **more):
    return {
        "source": ImageSource(NUM_SAMPLES), "fields": FIELDS, "transform": jitter,
        "batch_transform": scramble, "reports": Reports(progress=False, rows=root / "rows"), **more,
    }  # fmt: skip


@pytest.mark.parametrize("drawn", [False, True])
def test_a_batch_is_made_again_on_one_rank(tmp_path, drawn):
    policy = Weighted(np.arange(NUM_SAMPLES) % 4 + 1, num_samples=50) if drawn else None

    def on_rank(world):
        seen = {}
        with make(world, tmp_path / "a", importance=policy, **options(tmp_path)) as loader:
            for epoch in loader.epochs(2):
                for batch in loader:
                    seen[epoch, loader.step - 1, world.replica] = batch
        return seen

    everyone = run_threads(thread_worlds([2, 1], timeout_s=60), on_rank)
    trained = {place: batch for seen in everyone for place, batch in seen.items()}
    with make(single_world(), tmp_path / "b", importance=policy, **options(tmp_path)) as loader:
        for epoch, step, replica in trained:
            batch, again = (
                trained[epoch, step, replica],
                loader.replay(epoch, step, replica=replica),
            )
            assert batch.keys() == again.keys()
            for name, value in batch.items():
                assert torch.equal(value, again[name]), (name, epoch, step, replica)
        with pytest.raises(ValueError, match=r"step 99 of epoch 0 was never reached, expected one"):
            loader.replay(0, 99)
        with pytest.raises(ValueError, match=r"epoch 9 was never begun, expected one in \[0, "):
            loader.replay(9, 0)
        with pytest.raises(ValueError, match=r"replica is 3, expected one in \[0, 3\)"):
            loader.replay(0, 0, replica=3)


def test_without_a_log_it_is_refused(tmp_path):
    with make(single_world(), tmp_path) as loader:
        with pytest.raises(StateError, match=r"no log of rows.*give reports=Reports\(rows="):
            loader.replay(0, 0)
