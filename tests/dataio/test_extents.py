import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataio.extents import FreeExtents


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
