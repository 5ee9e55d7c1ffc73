import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.base.permutation import FEW, SMALL_RANGE, permute, permute_each, unpermute
from dataio.base.seeding import Key, generator, key

lengths = st.one_of(st.integers(1, 200), st.sampled_from([1023, 1024, 1025, 4097, 70_000]))
streams = st.integers(0, 2**32).map(lambda seed: key(seed, "test"))


@given(lengths, streams)
def test_every_value_stands_at_exactly_one_place(n, stream):
    values = permute(np.arange(n), n, stream)
    assert np.array_equal(np.sort(values), np.arange(n))


@given(lengths, streams)
def test_unpermute_undoes_permute(n, stream):
    places = np.arange(n)
    assert np.array_equal(unpermute(permute(places, n, stream), n, stream), places)


@given(lengths, streams, st.data())
def test_one_place_alone_gets_the_same_value(n, stream, data):
    place = data.draw(st.integers(0, n - 1))
    assert permute(place, n, stream) == permute(np.arange(n), n, stream)[place]


@given(lengths, st.lists(streams, max_size=5), st.data())
def test_many_permutations_at_once_are_each_as_by_itself(n, each, data):
    places = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    found = permute_each(places, n, each)
    assert found.shape == (len(each), len(places))
    for row, stream in zip(found, each, strict=True):
        assert np.array_equal(row, permute(np.array(places, np.int64), n, stream))


def test_places_that_are_walked_on_twice_stay_in_the_range():
    n = 65  # of 72 pairs: of these many places some leave it twice
    streams = [key(seed, "walk") for seed in range(300)]
    assert (np.sort(permute_each(np.arange(n), n, streams)) == np.arange(n)).all()


def test_ranges_beyond_memory_are_functions_too():
    n = 10**13 + 7
    places = np.array([0, 1, n // 2, n - 1])
    values = permute(places, n, key(0, "test"))
    assert np.array_equal(unpermute(values, n, key(0, "test")), places)
    assert len(set(values.tolist())) == 4


@pytest.mark.parametrize("n", [50, 65, 1000])
def test_every_value_reaches_every_place_alike(n):
    """Chi-square of where value 0 and value n-1 land, over many keys, in ten bins."""
    landed = np.array([unpermute([0, n - 1], n, key(seed, "mix")) for seed in range(2000)])
    for column in landed.T:
        counts = np.bincount(column * 10 // n, minlength=10)
        chi_square = ((counts - 200) ** 2 / 200).sum()
        assert chi_square < 33.7  # 99.99 % of chi-square with 9 degrees of freedom


@pytest.mark.parametrize("n", [65, 1000])
def test_neighbours_do_not_stay_together(n):
    gaps = np.abs(np.diff(permute(np.arange(n), n, key(1, "test"))))
    # Two random places lie n/3 apart on average.
    assert 0.25 * n < gaps.mean() < 0.42 * n


def test_a_place_outside_the_range_is_refused():
    with pytest.raises(ValueError, match=r"outside \[0, 10\)"):
        permute([3, 10], 10, key(0, "test"))


def test_keys_differ_in_every_part():
    parts = [
        key(0, "order"),
        key(1, "order"),
        key(0, "leaving"),
        key(0, "order", epoch=0),
        key(0, "order", epoch=1),
        key(0, "order", replica=0),
        key(0, "order", sample_id=0),
        key(0, "order", step=0),
        key(1, "order", epoch=0),
    ]
    assert len(set(parts)) == len(parts)


def test_a_key_always_opens_the_same_stream():
    first, again = (generator(key(3, "test")).integers(0, 2**60, 8) for _ in range(2))
    assert np.array_equal(first, again)


@given(st.integers(SMALL_RANGE + 1, 2**40), st.integers(0, 2**128 - 1), st.data())
def test_a_few_places_are_mapped_as_many_are(n, stream, data):
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=FEW)))
    many = np.append(places, np.zeros(FEW, np.int64))
    for function in (permute, unpermute):
        expected = function(many, n, Key(stream))[: len(places)]
        assert function(places, n, Key(stream)).tolist() == expected.tolist()
