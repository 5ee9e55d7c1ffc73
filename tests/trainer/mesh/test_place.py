"""Every rank has a place in the mesh, and all ranks agree on it."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tonari.trainer.mesh.place import num_stages, place_of, stages_of, tile_of

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")

schedules = st.sampled_from(SCHEDULES)
meshes = st.tuples(*[st.integers(1, 3)] * 5)
virtuals = st.integers(1, 3)


def places(sizes, schedule, virtual):
    return [
        place_of(rank, sizes, schedule=schedule, virtual=virtual)
        for rank in range(math.prod(sizes))
    ]


@given(st.integers(1, 8), schedules, virtuals)
def test_every_stage_has_one_rank_of_a_pipeline(pp, schedule, virtual):
    owned = [stage for r in range(pp) for stage in stages_of(r, pp, schedule, virtual)]
    assert sorted(owned) == list(range(num_stages(pp, schedule, virtual)))


@given(meshes, schedules, virtuals)
def test_replicas_share_no_rank_and_miss_none(sizes, schedule, virtual):
    everyone = places(sizes, schedule, virtual)
    groups = {place.replica: place.ranks for place in everyone}
    assert sorted(rank for ranks in groups.values() for rank in ranks) == list(range(len(everyone)))
    assert set(groups) == set(range(sizes[1] * sizes[2]))
    for place in everyone:
        assert place.rank in place.ranks
        assert groups[place.replica] == place.ranks == tuple(sorted(place.ranks))
        assert place.is_lone == (place.ranks == (place.rank,))


@given(meshes, schedules, virtuals)
def test_reader_and_scorer_are_the_first_peers_of_the_first_and_last_stage(
    sizes, schedule, virtual
):
    everyone = places(sizes, schedule, virtual)
    last = num_stages(sizes[0], schedule, virtual) - 1
    for place in everyone:
        members = [everyone[rank] for rank in place.ranks]
        first_stage = [p.rank for p in members if 0 in p.stages]
        last_stage = [p.rank for p in members if last in p.stages]
        assert list(place.input_ranks) == first_stage
        assert list(place.target_ranks) == last_stage
        assert (place.has_input, place.has_target) == (0 in place.stages, last in place.stages)
        assert (place.reader, place.scorer) == (first_stage[0], last_stage[0])
        assert list(place.readers) == sorted({p.reader for p in everyone})
        assert place.readers[place.replica] == place.reader
        assert list(place.scorers) == sorted({p.scorer for p in everyone})
        assert place.scorers[place.replica] == place.scorer


def test_ranks_lie_row_by_row_as_in_the_device_mesh():
    # pp 2, dp 2, tp 2: ranks 0..3 are the first stage, 4..7 the last.
    place = place_of(6, (2, 2, 1, 1, 2), schedule="1f1b", virtual=1)
    assert (place.replica, place.ranks) == (1, (2, 3, 6, 7))
    assert (place.reader, place.scorer, list(place.readers)) == (2, 6, [0, 2])
    assert (place.input_ranks, place.target_ranks, place.stages) == ((2, 3), (6, 7), (1,))


def test_folded_pipelines_score_where_they_read():
    for schedule in ("zbv", "dualpipev"):
        place = place_of(0, (2, 1, 1, 1, 1), schedule=schedule, virtual=1)
        assert (place.stages, place.scorer, place.has_target) == ((0, 3), 0, True)
        assert not place_of(1, (2, 1, 1, 1, 1), schedule=schedule, virtual=1).has_target


@given(meshes, schedules, virtuals)
def test_a_tile_s_ranks_are_placed_as_those_of_a_mesh_without_the_others(sizes, schedule, virtual):
    pp, dp_replicate, dp_shard, cp, tp = sizes
    alone = places((pp, dp_replicate, dp_shard, 1, tp), schedule, virtual)
    for rank in range(math.prod(sizes)):
        place = place_of(rank, sizes, schedule=schedule, virtual=virtual, tiles=True)
        own, others = tile_of(place), alone[(rank // (cp * tp)) * tp + rank % tp]
        assert place.tile == rank // tp % cp

        def here(other, tile=place.tile):
            """The rank of the whole mesh that has this tile at a rank's place."""
            return other // tp * cp * tp + tile * tp + other % tp

        assert own.rank == here(others.rank)
        for name in ("reader", "scorer"):
            assert getattr(own, name) == here(getattr(others, name))
        for name in ("ranks", "input_ranks", "target_ranks", "readers", "scorers"):
            assert [*getattr(own, name)] == [here(its) for its in getattr(others, name)]
