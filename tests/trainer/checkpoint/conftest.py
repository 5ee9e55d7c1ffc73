"""A job of one rank, for the tests that ask for it."""

from collections.abc import Iterator

import pytest

from dataio.job.launch import join


@pytest.fixture
def one_rank() -> Iterator[None]:
    with join(device="cpu"):
        yield
