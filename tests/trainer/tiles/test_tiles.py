"""What is computed on tiles is what one process computes; what could not be is refused by name."""

import json

import pytest

from tests.multirank import RunRanks

pytestmark = pytest.mark.multirank


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_ranks", "parts"),
    [
        pytest.param(2, [[2], [1, 2]], marks=pytest.mark.nightly),
        pytest.param(4, [[4], [1, 4]], marks=pytest.mark.nightly),
        (4, [[2, 2]]),
    ],
)
def test_outputs_losses_gradients_and_statistics_are_those_of_one_process(
    run_ranks: RunRanks, num_ranks: int, parts: list[list[int]]
) -> None:
    for report in run_ranks("trainer/tiles", num_ranks, json.dumps(parts)).reports:
        for case, found in report.items():
            errors = {name: value for name, value in found.items() if isinstance(value, float)}
            assert max(errors.values()) < 1e-9, (case, found)
            assert found.get("names", True), case
            assert found.get("sent", True), case
