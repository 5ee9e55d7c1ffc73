"""Models that were not written for the trainer: every mesh trains them as one process does."""

import importlib.util
import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from dataio.job.launch import join
from tests import hub, torchvision_v2
from tests.multirank import RunRanks
from tests.ranks.trainer.foreign_steps import run_case
from tests.trainer.foreign_models import batch_of, make, task_of
from tonari.trainer.mesh.parallelize import average_buffers
from tonari.trainer.mesh.place import Schedule

Case = tuple[str, str, list[int], dict[str, Any]]

DP, FSDP, TP, PP = [1, 2, 1, 1, 1], [1, 1, 2, 1, 1], [1, 1, 1, 1, 2], [2, 1, 1, 1, 1]
SCHEDULES: tuple[Schedule, ...] = (
    "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev",
)  # fmt: skip
PLAIN: list[Any] = [("1f1b", DP, {}), ("1f1b", FSDP, {}), ("1f1b", TP, {})]
EVERY: list[Any] = [(schedule, PP, {}) for schedule in SCHEDULES]
PP_DP, PP_FSDP, PP_TP, PP4 = [2, 2, 1, 1, 1], [2, 1, 2, 1, 1], [2, 1, 1, 1, 2], [4, 1, 1, 1, 1]


CASES: dict[str, dict[str, list[Any]]] = {
    "2": {
        "unruly": [
            ("1f1b", FSDP, {"checkpointing": "full"}), ("dualpipev", PP, {}),
            ("gpipe", PP, {"swap": 1, "checkpointing": "full"}),
        ],
        "llama": [("zero_bubble", PP, {})],
        "passing": [
            ("zero_bubble", PP, {"checkpointing": "full"}), ("dualpipev", PP, {}),
            ("1f1b", FSDP, {"checkpointing": "selective"}),
        ],
        "sharing": [("zbv", PP, {}), ("zero_bubble", PP, {"checkpointing": "full"})],
        "qwen3": [("1f1b", TP, {})],
        "glm": [("1f1b", TP, {})],
        "resnet": [PLAIN[0], ("zbv", PP, {})],
    },
    "2, more": {
        "unruly": [*PLAIN, *EVERY],
        "experts": [*PLAIN[:2], *EVERY],
        "passing": [*PLAIN[:2], *EVERY],
        "sharing": [*PLAIN[:2], *EVERY],
        "gpt2": [*PLAIN, *EVERY],
        "llama": [*PLAIN[1:], *EVERY],
        "resnet": [("1f1b", PP, {})],
    },
    "4": {
        "gpt2": [
            ("1f1b", PP_DP, {}), ("1f1b", PP_FSDP, {}), ("zbv", PP_TP, {}),
            ("1f1b", PP_FSDP, {"swap": 2}),
        ],
        "llama": [("1f1b", PP_DP, {}), ("interleaved", PP_TP, {})],
        "unruly": [("1f1b", PP4, {}), ("zbv", PP_FSDP, {}), ("1f1b", PP_TP, {}),
                   ("interleaved", PP_FSDP, {"swap": 1})],
        "passing": [("1f1b", PP_DP, {}), ("zbv", PP_FSDP, {}), ("interleaved", PP_FSDP, {})],
        "clamped": [("1f1b", [1, 4, 1, 1, 1], {})],
        "sharing": [("zero_bubble", PP_DP, {}), ("zbv", PP_FSDP, {})],
        "experts": [("1f1b", PP_DP, {}), ("zbv", PP_FSDP, {"checkpointing": "full"})],
    },
}  # fmt: skip
"""By ranks, whose number a name begins with, and model: schedules, sizes of the mesh, options."""
FROM = {"gpt2": "transformers", "llama": "transformers", "qwen3": "transformers",
        "glm": "transformers", "opt": "transformers", "resnet": "torchvision"}  # fmt: skip


def is_there(kind: str) -> bool:
    """Say whether the library is installed that a model is from, and make it ready."""
    if kind in FROM and importlib.util.find_spec(FROM[kind]) is None:
        return False
    needs(kind)
    return True


def alone(kind: str) -> dict[str, Any]:
    """Train in one process, by as many microbatches."""
    with join(device="cpu") as job:
        return run_case(job.world.rank, kind, "1f1b", [1, 1, 1, 1, 1], {})


def check(found: list[dict[str, Any]], expected: dict[str, Any], case: Case) -> None:
    """Compare what the ranks have with one process."""
    seen: set[str] = set()
    replicas = 1 + max(each["replica"] for each in found)
    for report in found:
        assert report["weights"], case
        assert report["norms"] == pytest.approx(expected["norms"], rel=1e-9), case
        for name, gradient in report["gradients"].items():
            assert near(gradient, expected["gradients"][name]), (case, name)
        # Replicas count their own rows, whose statistics are averaged: another mean than of all.
        for name, buffer in report["buffers"].items() if replicas == 1 else ():
            assert near(buffer.double(), expected["buffers"][name].double()), (case, name)
        seen |= set(report["gradients"])
        if report["losses"] is not None:
            # Of each step, the replica's rows.
            steps = expected["losses"].chunk(2)
            rows = torch.cat([step.chunk(replicas)[report["replica"]] for step in steps])
            assert near(report["losses"], rows), case
    assert seen == set(expected["gradients"]), case


def near(found: Tensor, expected: Tensor) -> bool:
    scale = expected.norm().clamp(min=1e-8)
    return found.shape == expected.shape and bool((found - expected).norm() <= 1e-9 * scale)


@pytest.mark.parametrize(
    "kind", ["unruly", "experts", "passing", "sharing", "gpt2", "llama", "resnet"]
)
def test_an_adapted_module_is_trained_as_by_plain_torch(kind: str) -> None:
    needs(kind)
    expected, model, task = alone(kind), make(kind), task_of(kind)
    if kind in ("unruly", "passing", "gpt2"):
        # What is drawn depends on the trainer's seeds: compared by the tests of meshes.
        return
    batch = batch_of(kind)
    losses = []
    for rows in range(0, 8, 2):
        part = {name: column[rows : rows + 2] for name, column in batch.items()}
        loss = task.losses(model(task.input(part)), task.target(part))
        losses.append(loss.detach())
        (loss * part["weight"]).sum().div(8).backward()
    assert near(expected["losses"][:8], torch.cat(losses))
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert expected["norms"][0] == pytest.approx(float(norm), rel=1e-9)


@pytest.mark.multirank
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cases",
    [
        "4",
        pytest.param("2", marks=pytest.mark.nightly),
        pytest.param("2, more", marks=pytest.mark.nightly),
    ],
)
def test_every_mesh_equals_one_process(run_ranks: RunRanks, cases: str) -> None:
    """One start of ranks for all models, as starts take longer than the steps."""
    num_ranks, by_kind = int(cases[0]), CASES[cases]
    kinds = [kind for kind in by_kind if is_there(kind)]
    full = [(kind, *case) for kind in kinds for case in by_kind[kind]]
    expected = {kind: alone(kind) for kind in kinds}
    ended = run_ranks("trainer/foreign_steps", num_ranks, json.dumps(full), timeout_s=600)
    reports = [
        torch.load(ended.directory / f"{rank}.pt", weights_only=True) for rank in range(num_ranks)
    ]
    for number, case in enumerate(full):
        check([report[number] for report in reports], expected[case[0]], case)


def test_buffers_that_a_style_of_tp_has_made_dtensors_of_are_averaged() -> None:
    # Gemma's embedding has one; torch's collectives take none.
    with join(device="cpu"):
        mesh = init_device_mesh("cpu", (1,))
        layer = torch.nn.Embedding(3, 2)
        scale = DTensor.from_local(torch.tensor([2.0]), mesh, [Replicate()])
        layer.register_buffer("scale", scale)
        average_buffers(layer)
        assert scale.to_local().tolist() == [2.0]


def needs(kind: str) -> None:
    if FROM.get(kind) == "transformers":
        hub.import_or_skip()
    elif FROM.get(kind) == "torchvision":
        torchvision_v2.import_or_skip()
