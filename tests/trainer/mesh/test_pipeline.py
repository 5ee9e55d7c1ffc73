"""Every schedule and mesh gives the gradients and scores of one plain process, to 1e-9."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dataio.job.launch import join
from tests.multirank import RunRanks
from tests.trainer.toy import Places, make_batch, make_toy
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.mesh import make_mesh
from tonari.trainer.mesh.pipeline import TORCH_NAMES, Pipeline, check_microbatches
from tonari.trainer.mesh.place import Schedule, place_of

SCHEDULES = tuple(TORCH_NAMES)
WHOLE = slice(0, 16)
ALONE = (1, 1, 1, 1, 1)


def reference() -> dict[str, Any]:
    """Do in plain torch what the program of the ranks does."""
    model, task, batches = make_toy(), Places(), [make_batch(number, WHOLE) for number in range(3)]
    expected: dict[str, Any] = {}
    scores = [judge(model, task, batch) for batch in batches]
    expected["before"] = expected["trained"] = scores[0]
    expected["again"] = scores[1]
    mean(model, task, batches[0]).backward()
    expected["gradients"] = flat(model)
    valid = torch.cat([batch["valid"] for batch in batches])
    right = torch.cat([torch.tensor(score[1], dtype=torch.float64) for score in scores])[valid]
    loss = torch.cat([torch.tensor(score[0], dtype=torch.float64) for score in scores])[valid]
    expected["evaluated"] = [float(right.mean()), float(loss.mean())]
    model.zero_grad()
    ((mean(model, task, batches[0]) + mean(model, task, batches[1])) / 2).backward()
    expected["accumulated"] = flat(model)
    expected["norm"] = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    expected["clipped"] = flat(model)
    return expected


def mean(model: nn.Module, task: Places, batch: dict[str, Tensor]) -> Tensor:
    losses = task.losses(model(task.input(batch)), task.target(batch))
    return (losses * batch["weight"]).mean()


def judge(model: nn.Module, task: Places, batch: dict[str, Tensor]) -> list[list[float]]:
    with torch.no_grad():
        logits, target = model(task.input(batch)), task.target(batch)
        columns = (task.losses(logits, target), *task.outcome(logits, target))
    return [column.double().tolist() for column in columns]


def flat(model: nn.Module) -> dict[str, list[float]]:
    named = model.named_parameters()
    return {name: p.grad.flatten().tolist() for name, p in named if p.grad is not None}


def check(reports: list[dict[str, Any]], case: str) -> None:
    """Compare all ranks' reports of a case with the reference."""
    expected, found = reference(), [report[case] for report in reports]
    num_rows = 16 // (1 + max(report["replica"] for report in found))
    for report in found:
        for name in ("gradients", "accumulated", "clipped"):
            for parameter, values in report[name].items():
                assert near(values, expected[name][parameter]), (case, name, parameter)
        assert report["norm"] == pytest.approx(expected["norm"], rel=1e-9), case
        assert report["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-9), case
        if case.endswith(",2"):
            assert "different values behind stage 3 of the pipeline" in report["differing"], case
        # One forward and one training pass of four microbatches, and no call beside.
        assert report["calls"] == (8 if report["has_target"] else 0), case
        first = report["replica"] * num_rows
        for name in ("before", "trained", "again"):
            if not report["has_target"]:
                assert report[name] is None
                continue
            rows = [column[first : first + num_rows] for column in expected[name]]
            assert near(report[name][0], rows[0]), (case, name)
            assert report[name][1] == rows[1], (case, name)
            assert report[name][2] == pytest.approx(rows[2], rel=1e-6), (case, name)
    owned = [set(report["gradients"]) for report in found]
    assert set.union(*owned) == set(expected["gradients"]), case


def near(found: list[float], expected: list[float]) -> bool:
    left, right = (torch.tensor(values, dtype=torch.float64) for values in (found, expected))
    return left.shape == right.shape and bool((left - right).norm() <= 1e-9 * right.norm())


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        pytest.param(
            1,
            ["1f1b:1,1,1,1,1", "interleaved:1,1,1,1,1", "zbv:1,1,1,1,1"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            2,
            [
                *(f"{schedule}:2,1,1,1,1" for schedule in SCHEDULES),
                "gpipe:1,2,1,1,1", "gpipe:1,1,2,1,1", "gpipe:1,1,1,2,1", "gpipe:1,1,1,1,2",
            ],
            marks=pytest.mark.nightly,
        ),
        (
            4,
            [
                *(f"{schedule}:2,1,2,1,1" for schedule in SCHEDULES),
                *(f"{schedule}:2,1,1,1,2" for schedule in SCHEDULES),
                "1f1b:1,2,2,1,1", "1f1b:2,2,1,1,1", "zbv:2,2,1,1,1", "zbv:2,1,1,2,1",
                "1f1b:4,1,1,1,1",
            ],
        ),
        pytest.param(
            8,
            [f"{schedule}:2,1,2,1,2" for schedule in SCHEDULES],
            marks=pytest.mark.skipif("TONARI_LONG" not in os.environ, reason="8 ranks: on demand"),
        ),
    ],
    ids=["1", "2", "4", "8"],
)  # fmt: skip
def test_every_schedule_and_mesh_equals_one_process(
    run_ranks: RunRanks, num_ranks: int, cases: list[str]
) -> None:
    reports = run_ranks("trainer/pipeline_steps", num_ranks, *cases, timeout_s=240).reports
    for case in cases:
        check(reports, case)


def make_alone(microbatches: int = 1, batch_size: int = 16) -> Pipeline:
    return Pipeline(
        [make_toy()], place_of(0, ALONE, schedule="1f1b", virtual=1),
        make_mesh(ALONE, device_type="cpu"), Places(), schedule="1f1b", microbatches=microbatches,
        batch_size=batch_size, device=torch.device("cpu"),
    )  # fmt: skip


def test_a_rank_without_parameters_is_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(
            ConfigError, match=r"ranks 0, 1 of .* without parameters only, .* block"
        ):
            Pipeline(
                [nn.Tanh()], place_of(0, (2, 1, 1, 1, 1), schedule="1f1b", virtual=1),
                make_mesh((2, 1, 1, 1, 1), device_type="cpu"), Places(), schedule="1f1b",
                microbatches=2, batch_size=4, device=torch.device("cpu"),
            )  # fmt: skip
    finally:
        dist.destroy_process_group()


def test_a_batch_of_another_size_is_refused() -> None:
    with join(device="cpu"):
        pipeline = make_alone()
        for run in (pipeline.train, pipeline.forward):
            with pytest.raises(ValueError, match=r"12 rows, expected 16: .*weight 0"):
                run(make_batch(0, slice(0, 12)))


def test_microbatches_that_do_not_divide_the_batch_are_refused() -> None:
    with join(device="cpu"), pytest.raises(ConfigError, match=r"microbatches is 3, .* 16; choose"):
        make_alone(microbatches=3)


@pytest.mark.parametrize(
    ("schedule", "pp", "microbatches", "says"),
    [
        ("1f1b", 4, 2, "expected at least 4"),
        ("dualpipev", 2, 2, "expected at least 4"),
        ("interleaved", 2, 5, "2 equal rounds"),
        ("zero_bubble", 2, 7, "3 equal rounds"),
    ],
)
def test_a_schedule_says_which_microbatches_it_takes(
    schedule: Schedule, pp: int, microbatches: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_microbatches(
            batch_size=70 * microbatches, microbatches=microbatches, pp=pp, schedule=schedule,
            virtual=2,
        )  # fmt: skip
