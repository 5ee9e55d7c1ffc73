"""Replicas whose forward passes differ by a draw: gradients as one process would have them."""

import json
from typing import Any

import pytest
import torch

from tests.multirank import RunRanks
from tests.trainer.mesh.test_foreign import DP, FSDP, alone, check, is_there

CASES: dict[str, list[Any]] = {
    "dropped": [DP, FSDP],
    "dropped layers": [DP, FSDP],
    "large dropped": [DP],
    "branches": [DP, FSDP],
    "branches layers": [FSDP],
    "large branches": [DP],
    "silent": [DP, FSDP],
    "large silent": [DP],
    "opt": [DP, FSDP],
}
"""By model: the sizes of its meshes."""


@pytest.mark.multirank
@pytest.mark.timeout(300)
def test_replicas_that_use_other_weights_equal_one_process(run_ranks: RunRanks) -> None:
    """One start of ranks for all models, as starts take longer than the steps."""
    full: list[Any] = [
        (kind, "1f1b", sizes, {})
        for kind, meshes in CASES.items()
        if is_there(kind)
        for sizes in meshes
    ]
    expected = {kind: alone(kind) for kind in CASES if is_there(kind)}
    ended = run_ranks("trainer/foreign_steps", 2, json.dumps(full), timeout_s=240)
    reports = [torch.load(ended.directory / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for number, (kind, *case) in enumerate(full):
        check([report[number] for report in reports], expected[kind], (kind, *case))
