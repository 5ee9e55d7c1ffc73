"""An optimizer steps over parts of weights as over whole ones, whatever it looks at."""

import pytest
import torch

from tests.multirank import RunRanks
from tests.ranks.trainer.whole_steps import KINDS, run


@pytest.mark.multirank
def test_optimizers_step_with_parts_of_weights_as_with_whole_ones(run_ranks: RunRanks) -> None:
    ended = run_ranks("trainer/whole_steps", 2, timeout_s=120)
    on_whole: dict[str, set[bool]] = {}
    for rank in range(2):
        for name, found in torch.load(ended.directory / f"{rank}.pt", weights_only=True).items():
            kind = name[:-2]
            # Muon multiplies in bfloat16.
            apart = 1e-2 if kind == "muon" else 1e-9
            for one, other in zip(
                found["weights"], run(kind, splits=False)["weights"], strict=True
            ):
                assert torch.allclose(one, other, rtol=apart, atol=apart), name
            on_whole.setdefault(kind, set()).add(found["on_whole"])
    assert on_whole["adafactor"] == on_whole["of parts"] == {True}
    # Others keep what they remember in parts.
    assert [on_whole[kind] for kind in ("lamb", "momentum", "adamw")] == [{False}] * 3
    assert set(on_whole) == set(KINDS)
