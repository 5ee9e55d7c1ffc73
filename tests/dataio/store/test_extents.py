from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataio.store.files.extents import FreeExtents, find_free_positions, join_positions
from dataio.store.files.manifest import Column


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20),
    st.lists(st.integers(0, 40), max_size=30),
    st.randoms(use_true_random=False),
)
def test_nothing_handed_out_touches_what_is_live_or_handed_out_before(live, wanted, random):
    # gap and length of each live extent, laid one after another
    starts, end = [], 0
    for gap, length in live:
        starts.append(end + gap)
        end = starts[-1] + length
    extents = list(zip(starts, [length for _, length in live], strict=True))
    random.shuffle(extents)
    offsets = np.array([offset for offset, _ in extents], np.int64)
    lengths = np.array([length for _, length in extents], np.int64)
    free = FreeExtents(offsets, lengths)
    used = np.zeros(end + sum(wanted) + 1, np.int64)
    for offset, length in extents:
        used[offset : offset + length] += 1
    for length in wanted:
        offset = int(free.take(np.array([length]))[0])
        used[offset : offset + length] += 1
    assert used.max(initial=0) <= 1


def test_gaps_are_filled_before_the_file_grows():
    free = FreeExtents(np.array([10, 30]), np.array([10, 10]))
    assert sorted(free.take(np.array([10, 10])).tolist()) == [0, 20]
    assert free.take(np.array([10])).tolist() == [40]
    assert free.end == 50


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.lists(st.one_of(st.integers(0, 40), st.just(None)), max_size=40),
    st.randoms(use_true_random=False),
)
def test_what_is_given_back_is_handed_out_again_and_nothing_overlaps(sizes, steps, random):
    lengths = np.array(sizes, np.int64)
    free = FreeExtents(np.cumsum(lengths) - lengths, lengths)
    live = list(zip((np.cumsum(lengths) - lengths).tolist(), sizes, strict=True))
    for length in steps:
        if length is None and live:
            offset, size = live.pop(random.randrange(len(live)))
            free.give_back(np.array([offset]), np.array([size]))
        elif length is not None:
            live.append((int(free.take(np.array([length]))[0]), length))
        extents = sorted((a, a + n) for a, n in live if n)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(extents))
        assert all(stop <= free.end for _, stop in extents)
    for offset, size in live:
        free.give_back(np.array([offset]), np.array([size]))
    assert free.end == 0, "all gaps were joined"


def test_positions_are_free_that_no_manifest_mentions():
    first = Column(np.array([4, -1, 0]), 3, np.int64)
    second = Column(np.array([2]), 1, np.int64)
    assert find_free_positions(6, [first, second]).tolist() == [1, 3, 5]
    assert find_free_positions(6, [Column((0, 1), 4, np.int64)]).tolist() == [4, 5]


@given(st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)))
def test_joined_positions_are_ascending_and_each_is_there_once(free, more):
    joined = join_positions(np.array(free, np.int64), np.array(more, np.int64))
    assert joined.dtype == np.int64
    assert joined.tolist() == sorted({*free, *more})
