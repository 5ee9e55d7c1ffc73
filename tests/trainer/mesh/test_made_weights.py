"""Weights made one by one, on pipelines of shipped models, are those of the model in memory."""

import json

import pytest

from tests.multirank import RunRanks
from tests.ranks.trainer.made_weights import MAKERS

pytestmark = pytest.mark.multirank

DEEP = sorted(set(MAKERS) - {"cnn"})
TEXT = ("gpt", "llama", "tied llama")
CASES = {
    "2": [("cnn", "1f1b", [2, 1, 1, 1, 1]), *((kind, "zbv", [2, 1, 1, 1, 1]) for kind in DEEP)],
    "4": [
        *((kind, "zbv", [2, 1, 2, 1, 1]) for kind in DEEP),
        *((kind, "1f1b", [2, 1, 1, 1, 2]) for kind in TEXT),
    ],
    "4, more": [
        *((kind, "1f1b", [1, 1, 2, 1, 2]) for kind in TEXT),
        *((kind, "1f1b", [1, 2, 2, 1, 1]) for kind in MAKERS),
    ],
}


@pytest.mark.parametrize(
    "cases",
    [
        "4",
        pytest.param("2", marks=pytest.mark.nightly),
        pytest.param("4, more", marks=pytest.mark.nightly),
    ],
)
def test_stages_made_weight_by_weight_are_those_of_the_model_in_memory(
    run_ranks: RunRanks, cases: str
) -> None:
    given = CASES[cases]
    for report in run_ranks("trainer/made_weights", int(cases[0]), json.dumps(given)).reports:
        failed = [case for case, same in zip(given, report["same"], strict=True) if not same]
        assert not failed
