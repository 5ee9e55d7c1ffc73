"""The rows to choose among: places that do not depend on where a row lies."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataio.base.seeding import key
from dataio.plan.history import Candidates, alone, score_dtype, unscored


def candidates(sample_id, num_samples, *, epoch=0):
    scores = unscored(len(sample_id), score_dtype(()))
    stream = key(5, "importance", epoch=epoch)
    return Candidates(scores, np.asarray(sample_id, np.int64), num_samples, stream)


@given(st.integers(1, 300), st.integers(0, 2**32))
def test_places_of_all_pools_are_all_places_once_and_a_sample_has_its_own(num_samples, seed):
    whole = candidates(np.arange(num_samples), num_samples).places
    assert sorted(whole.tolist()) == list(range(num_samples))
    held = np.random.default_rng(seed).permutation(num_samples)
    cuts = np.sort(np.random.default_rng(seed + 1).integers(0, num_samples + 1, 2))
    for ids in np.split(held, cuts):
        places = candidates(ids, num_samples).places
        assert places.dtype == np.int64
        assert places.tolist() == whole[ids].tolist()


def test_places_are_others_in_another_epoch():
    ids = np.arange(1000)
    one, other = (candidates(ids, 1000, epoch=epoch).places for epoch in (0, 1))
    assert (one == other).mean() < 0.02


def test_a_pool_that_decides_by_itself_adds_nothing():
    values = np.array([1, 2, 3])
    assert alone(values).tolist() == [1, 2, 3]
    assert candidates([0], 1).total(values).tolist() == [1, 2, 3]
