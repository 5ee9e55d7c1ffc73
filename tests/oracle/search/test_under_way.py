"""How many microbatches are under way at a time, by torch's own orders."""

import itertools

import pytest

from tests.oracle.search.orders import orders
from tonari.trainer.mesh.place import num_stages
from tonari.trainer.run.build import RunLayout
from tonari.trainer.run.memory import under_way


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("interleaved", 2), ("interleaved", 4), ("zero_bubble", 3), ("zbv", 1), ("dualpipev", 1)],
)
def test_microbatches_under_way_are_those_of_torchs_own_orders(schedule, virtual):
    for pp, rounds in itertools.product((2, 4, 8), (2, 3)):
        stages, microbatches = num_stages(pp, schedule, virtual), pp * rounds
        layout = RunLayout(sizes=(pp, 1, 1, 1, 1), num_stages=stages, microbatches=microbatches)
        of_ranks = orders(schedule, pp=pp, virtual=virtual, microbatches=microbatches)
        for rank, order in enumerate(of_ranks):
            kept = most = 0.0
            for (kind, _, _), _, of_backward in order:
                # Until the gradients of its weights are there
                kept += (kind == "forward") - (kind == "weights" or of_backward == 1.0)
                most = max(most, kept)
            assert under_way(schedule, pp, rank, layout) == most / (stages // pp)


def test_schedules_of_one_stage_a_rank_keep_all_or_one_for_each_rank_behind():
    layout = RunLayout(sizes=(4, 1, 1, 1, 1), num_stages=4, microbatches=8)
    assert under_way("gpipe", 4, 1, layout) == 8
    assert [under_way("1f1b", 4, rank, layout) for rank in range(4)] == [4, 3, 2, 1]
    alone = RunLayout(sizes=(1, 1, 1, 1, 1), num_stages=1, microbatches=8)
    assert under_way("gpipe", 1, 0, alone) == 1
