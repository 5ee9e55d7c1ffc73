"""Every model on every kind of mesh equals one process; one start of ranks, many cases."""

import json

import pytest

from tests.multirank import RunRanks
from tests.trainer.mesh.tiny_models import MAKERS

pytestmark = pytest.mark.multirank

Options = dict[str, object]
SEQUENCE: Options = {"sequence_parallel": True}
SPLIT: Options = {"sequence_parallel": True, "loss_parallel": True}
Case = tuple[str, list[int], Options]
LOSS: Options = {"loss_parallel": True}


def every_model(sizes: list[int]) -> list[Case]:
    """Make a case of each kind, without options."""
    return [(kind, sizes, {}) for kind in MAKERS]


# Sizes of pp, dp_replicate, dp_shard, cp, tp.
DP, FSDP, CP, TP = [1, 2, 1, 1, 1], [1, 1, 2, 1, 1], [1, 1, 1, 2, 1], [1, 1, 1, 1, 2]
ON_TWO: list[Case] = [
    *every_model(DP),
    *every_model(TP),
    ("cnn", TP, LOSS),
    ("resnet", TP, LOSS),
    ("vit", TP, SPLIT),
    ("gpt", TP, SEQUENCE),
    ("gpt", TP, SPLIT),
    ("resnet", FSDP, {}),
    ("gpt", FSDP, {"checkpointing": "full"}),
    ("gpt", FSDP, {"swap": 3}),
    ("gpt", TP, SPLIT | {"swap": 3}),
    ("llama", CP, {"swap": 2}),
    ("vit", FSDP, {"checkpointing": "selective", "offload": True}),
    ("gpt", CP, {}),
    ("llama", TP, SPLIT),
    ("llama", FSDP, {"checkpointing": "full"}),
    ("llama", CP, {}),
    ("tied llama", DP, {}),
    ("tied llama", FSDP, {}),
    ("tied llama", TP, {}),
    ("tied llama", TP, SPLIT),
]
HSDP, DP_TP, FSDP_TP = [1, 2, 2, 1, 1], [1, 2, 1, 1, 2], [1, 1, 2, 1, 2]
ON_FOUR: list[Case] = [
    *every_model(HSDP),
    ("resnet", DP_TP, {}),
    ("gpt", DP_TP, SPLIT),
    ("vit", FSDP_TP, SPLIT | {"checkpointing": "full", "checkpointing_blocks": 2}),
    ("gpt", FSDP_TP, SPLIT | {"checkpointing": "selective"}),
    ("vit", FSDP_TP, SPLIT | {"swap": 3}),
    ("llama", FSDP_TP, SPLIT | {"swap": 1, "checkpointing": "full"}),
    ("gpt", [1, 1, 2, 2, 1], {}),
    ("gpt", [1, 1, 1, 2, 2], SPLIT),
    ("gpt", [1, 1, 1, 1, 4], SPLIT),
    ("llama", FSDP_TP, SPLIT | {"checkpointing": "selective"}),
    ("llama", [1, 1, 1, 2, 2], SPLIT),
    ("tied llama", FSDP_TP, SPLIT),
]
HALF: list[Case] = [("gpt", FSDP_TP, SPLIT | {"dtype": "bfloat16", "swap": 3})]


@pytest.mark.parametrize(
    ("num_ranks", "cases"), [pytest.param(2, ON_TWO, marks=pytest.mark.nightly), (4, ON_FOUR)]
)
def test_gradients_losses_and_names_are_those_of_one_process(
    run_ranks: RunRanks, num_ranks: int, cases: list[Case]
) -> None:
    ended = run_ranks(
        "trainer/parallel_models", num_ranks, json.dumps(cases + HALF * (num_ranks == 4))
    )
    assert "Warning" not in ended.output
    for report in ended.reports:
        reports = report["cases"]
        assert len(reports) == len(cases) + (num_ranks == 4)
        for case, found in zip(cases, reports, strict=False):
            assert found["names"], case
            assert found["weights"], case
            assert found["sharded"], case
            assert max(found["gradient"], found["loss"], found["confidence"]) < 1e-9, (case, found)
            assert found["correct"], case
            assert found["shape"], case
            assert found["split"] == bool(case[2].get("loss_parallel")), case
        for half in reports[len(cases) :]:
            assert half["gradient"] < 0.1
            assert half["loss"] < 0.01
            assert half["dtype"] == "torch.bfloat16"
            assert half["shape"]
