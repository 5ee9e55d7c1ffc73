"""A model that one process cannot hold trains on four."""

import json

import pytest
import torch

from tests.multirank import RunRanks
from tests.ranks.trainer.limited import build

pytestmark = [pytest.mark.multirank, pytest.mark.thorough]


def test_a_model_that_one_process_cannot_hold_trains_on_four(run_ranks: RunRanks) -> None:
    with torch.device("meta"):
        weights_bytes = sum(parameter.nbytes for parameter in build().parameters())
    limit = str(int(0.95 * weights_bytes))
    # malloc returns what is freed: a limit counts what it keeps, too.
    env = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    alone = run_ranks(
        "trainer/limited", 1, json.dumps([1, 1, 1, 1, 1]), limit, check=False, env=env, fresh=True
    )
    assert alone.returncode
    assert "allocate memory" in alone.output
    four = run_ranks("trainer/limited", 4, json.dumps([4, 1, 1, 1, 1]), limit, env=env, fresh=True)
    losses = [report["losses"] for report in four.reports if report["losses"]]
    assert losses
    assert all(last < first for first, last in losses)
