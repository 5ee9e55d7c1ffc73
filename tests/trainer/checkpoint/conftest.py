"""A job of one rank, for the tests that ask for it."""

from collections.abc import Iterator

import pytest

from tonari.trainer.watch.launch import join


@pytest.fixture
def one_rank() -> Iterator[None]:
    with join(device="cpu"):
        yield
