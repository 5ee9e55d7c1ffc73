"""The lab as a fixture: a cluster of a test's own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.lab.cluster import Lab, what_is_missing

MakeLab = Callable[..., Lab]


@pytest.fixture
def make_lab(tmp_path: Path) -> Iterator[MakeLab]:
    """Bring up ``num_nodes`` nodes with links of ``rate``; taken down when the test ends."""
    if reason := what_is_missing():
        pytest.skip(reason)
    with ExitStack() as stack:

        def make(num_nodes: int = 4, rate: str = "") -> Lab:
            return stack.enter_context(Lab(tmp_path / "lab", num_nodes, rate))

        yield make
