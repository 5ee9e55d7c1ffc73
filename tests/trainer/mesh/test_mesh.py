import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.job.launch import join
from tests.multirank import RunRanks
from tests.oracle.test_trace import GPT
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.mesh import (
    AXES,
    axis_sizes,
    check_context,
    make_mesh,
    name_roles,
    num_microbatches,
)
from tonari.trainer.mesh.pipeline import check_microbatches
from tonari.trainer.mesh.place import Schedule

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@given(copies=st.integers(1, 64), shards=st.integers(1, 8))
def test_axes_left_out_take_the_ranks_that_remain(copies: int, shards: int) -> None:
    sizes = axis_sizes(copies * shards, dp_shard=shards)
    assert math.prod(sizes) == copies * shards
    assert dict(zip(AXES, sizes, strict=True))["dp_shard"] == shards


def test_a_rank_is_named_by_the_axes_that_have_several() -> None:
    assert name_roles((2, 1, 2, 1, 2))[5] == "pp 1, dp_shard 0, tp 1"


@given(st.tuples(*(st.integers(1, 3) for _ in AXES)))
def test_any_sizes_whose_product_is_the_world_are_taken(sizes: tuple[int, ...]) -> None:
    named: dict[str, Any] = dict(zip(AXES, sizes, strict=True))
    assert axis_sizes(math.prod(sizes), **named) == sizes
    del named["dp_replicate"]
    assert axis_sizes(math.prod(sizes), **named) == sizes


@given(pp=st.integers(1, 4), virtual=st.integers(1, 3), schedule=st.sampled_from(SCHEDULES))
def test_left_out_a_batch_is_cut_as_every_schedule_takes_it(
    pp: int, virtual: int, schedule: Schedule
) -> None:
    parts = num_microbatches(None, pp=pp, schedule=schedule, virtual=virtual)
    check_microbatches(
        batch_size=12 * parts, microbatches=parts, pp=pp, schedule=schedule, virtual=virtual
    )
    assert num_microbatches(5, pp=pp, schedule=schedule, virtual=virtual) == 5


@pytest.mark.parametrize(
    ("length", "found"), [(None, "images"), (7, "sequences of 7")], ids=["images", "odd text"]
)
def test_context_parallelism_needs_a_sequence_that_it_divides(
    length: int | None, found: str
) -> None:
    check_context(2, sequence_length=8)
    check_context(1, sequence_length=length)
    with pytest.raises(ConfigError, match=rf"mesh.cp is 2, which does not divide {found}; leave"):
        check_context(2, sequence_length=length)


@pytest.mark.parametrize("axes", [{"dp_shard": 3}, {"dp_replicate": 3}, {"dp_shard": 8}])
def test_axes_that_do_not_give_the_job_s_ranks_are_refused(axes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"ranks, but the job has 4; start that many .* leave"):
        axis_sizes(4, **axes)


def test_axes_of_size_one_are_kept() -> None:
    with join(device="cpu") as job:
        mesh = make_mesh(axis_sizes(job.world.world_size), device_type="cpu")
        assert mesh.mesh_dim_names == AXES
        assert mesh.shape == (1, 1, 1, 1, 1)


@pytest.mark.multirank
def test_a_second_job_of_one_process_has_groups_of_its_own(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text(GPT)
    ended = run_ranks(
        "trainer/two_jobs", 4, str(settings), "mesh.dp_shard=2", "mesh.dp_replicate=2"
    )  # fmt: skip
    assert len(ended.reports) == 4
    for report in ended.reports:
        # The batch is the same on every rank and in both jobs
        assert report["second"] == report["first"] == ended.reports[0]["first"]
        assert report["first"][0] > 0
