"""What the tests of meshes share."""

from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import DeviceMesh

from dataio.job.launch import join
from tonari.trainer.mesh.mesh import make_mesh


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One process, alone on every axis."""
    with join(device="cpu"):
        yield make_mesh((1, 1, 1, 1, 1), device_type="cpu")
