import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import ConfigError
from trainer.launch import join
from trainer.mesh import AXES, axis_sizes, make_mesh


@given(copies=st.integers(1, 64), shards=st.integers(1, 8))
def test_axes_left_out_take_the_ranks_that_remain(copies: int, shards: int) -> None:
    sizes = axis_sizes(copies * shards, dp_shard=shards)
    assert math.prod(sizes) == copies * shards
    assert dict(zip(AXES, sizes, strict=True))["dp_shard"] == shards


@pytest.mark.parametrize("axis", ["pp", "cp", "tp"])
def test_an_axis_not_trained_over_yet_is_refused(axis: str) -> None:
    with pytest.raises(ConfigError, match=rf"mesh.{axis} is 2, expected 1: .* data-parallel only"):
        axis_sizes(4, **{axis: 2})


@pytest.mark.parametrize("axes", [{"dp_shard": 3}, {"dp_replicate": 3}, {"dp_shard": 8}])
def test_axes_that_do_not_give_the_job_s_ranks_are_refused(axes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"ranks, but the job has 4; start that many, or leave"):
        axis_sizes(4, **axes)


def test_axes_of_size_one_are_kept() -> None:
    with join(device="cpu") as job:
        mesh = make_mesh(axis_sizes(job.world.world_size), device_type="cpu")
        assert mesh.mesh_dim_names == AXES
        assert mesh.shape == (1, 1, 1, 1, 1)
