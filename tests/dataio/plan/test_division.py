import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataio.plan.layout import cut_at_shards, divide_along_shards
from dataio.store.staging import StagingPiece, plan_pieces

SHARDS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def make(sizes, keep):
    """First samples of shards of these sizes, and the ids that a node misses of them."""
    ids = np.flatnonzero(keep.random(sum(sizes)) < 0.7)
    return np.cumsum([0, *sizes[:-1]]), ids


@given(SHARDS, st.integers(0, 99), st.integers(1, 6))
def test_parts_cover_every_row_once_and_none_is_twice_its_due(sizes, seed, num_parts):
    starts, ids = make(sizes, np.random.default_rng(seed))
    cuts = divide_along_shards(ids, shard_starts=starts, num_parts=num_parts)
    assert cuts[0] == 0
    assert cuts[-1] == len(ids)
    rows = np.diff(cuts)
    assert (rows >= 0).all()
    assert rows.max() <= 2 * len(ids) / num_parts + 1


def test_shards_are_not_cut_where_they_can_be_dealt_out():
    starts = np.arange(0, 700, 100)
    cuts = divide_along_shards(np.arange(700), shard_starts=starts, num_parts=3)
    assert set(cuts.tolist()) <= {*starts.tolist(), 700}
    assert np.diff(cuts).min() >= 200


def test_few_large_shards_are_cut_so_that_every_reader_has_work():
    cuts = cut_at_shards(np.arange(100), shard_starts=np.array([0]), num_readers=4)
    assert cuts.tolist() == [0, 25, 50, 75, 100]


@given(SHARDS, st.integers(0, 99), st.integers(1, 4), st.integers(1, 3), st.integers(1, 50))
def test_a_nodes_ranks_and_readers_read_every_missing_row_once(
    sizes, seed, local_size, readers, least_rows
):
    rng = np.random.default_rng(seed)
    starts, ids = make(sizes, rng)
    ids = rng.permutation(ids)
    missing = StagingPiece(seed, np.arange(len(ids)), ids, np.arange(len(ids)) + 5)
    pieces = [
        piece
        for rank in range(local_size)
        for piece in plan_pieces(
            missing, shard_starts=starts, local_rank=rank, local_size=local_size,
            num_readers=readers, least_rows=least_rows,
        )
    ]  # fmt: skip
    assert all((np.diff(piece.sample_ids) > 0).all() for piece in pieces)
    read = np.concatenate([np.empty(0, np.int64), *(piece.slots for piece in pieces)])
    assert sorted(read.tolist()) == list(range(len(ids)))
    for piece in pieces:
        assert np.array_equal(ids[piece.slots], piece.sample_ids)
        assert np.array_equal(piece.positions, piece.slots + 5)


def test_ranks_take_groups_of_few_rows_in_turns():
    def readers_of(group, num_rows):
        missing = StagingPiece(group, *[np.arange(num_rows)] * 3)
        return [
            rank
            for rank in range(4)
            if plan_pieces(
                missing, shard_starts=np.array([0]), local_rank=rank, local_size=4,
                num_readers=2, least_rows=100,
            )
        ]  # fmt: skip

    assert [readers_of(group, 99) for group in range(5)] == [[0], [1], [2], [3], [0]]
    assert readers_of(1, 200) == [1, 2]
    assert readers_of(1, 400) == [0, 1, 2, 3]
