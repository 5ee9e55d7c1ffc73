"""Exchanging models helps; and real ranks do it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dataio.world import World, run_threads, thread_worlds
from shuffle import ModelExchange
from tests.multirank import ROOT, RunRanks, launch_command, run_job


def distance_to_optimum(num_replicas: int, exchange: str | None) -> float:
    """Fit a line through classes of points that lie on one replica each; how far from the best?"""
    rng = np.random.default_rng(0)
    points = torch.tensor(rng.normal(size=(num_replicas, 40, 6)), dtype=torch.float64)
    points += torch.tensor(rng.normal(size=(num_replicas, 1, 6)))
    truth = torch.tensor(rng.normal(size=(num_replicas, 6)))
    targets = torch.einsum("rnd,rd->rn", points, truth)
    best = torch.linalg.lstsq(points.reshape(-1, 6), targets.reshape(-1, 1)).solution[:, 0]

    def act(world: World) -> float:
        model = nn.Linear(6, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        mode: Any = exchange or "average"
        trade = ModelExchange(model, optimizer, world=world, every=4, mode=mode)
        for _ in range(400):
            optimizer.zero_grad()
            (model(points[world.rank])[:, 0] - targets[world.rank]).pow(2).mean().backward()
            optimizer.step()
            if exchange:
                trade.step()
        trade.flush()
        if exchange:
            trade.average_all()
        return float((model.weight[0] - best).norm().detach())

    distances: Iterator[float] = iter(run_threads(thread_worlds([num_replicas]), act))
    return sum(distances) / num_replicas


@pytest.mark.parametrize("mode", ["average", "swap"])
def test_exchanging_models_ends_nearer_the_optimum_of_all_rows_than_training_apart(
    mode: str,
) -> None:
    apart = distance_to_optimum(4, None)
    assert distance_to_optimum(4, mode) < 0.5 * apart


@pytest.mark.multirank
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_real_ranks_exchange_and_resume_in_the_middle_of_a_round(
    run_ranks: RunRanks, num_ranks: int
) -> None:
    reports = run_ranks("model_exchange", num_ranks, timeout_s=90).reports
    for mode in ("average", "swap"):
        ended = [report[mode] for report in reports]
        assert len({told["whole"] for told in ended}) == num_ranks, "they train apart"
        assert len({told["mean"] for told in ended}) == 1
        for told in ended:
            assert told["resumed"] == told["whole"]
            assert told["stats"]["rounds"] + told["stats"]["rounds_alone"] == 4
            if num_ranks == 2:
                assert told["stats"]["sent_bytes"] > 4 * 2 * 400 * 400 * 4


@pytest.mark.multirank
def test_a_silent_partner_on_real_ranks_is_named_within_the_limit(run_ranks: RunRanks) -> None:
    ended = run_ranks("model_exchange_dies", 2, check=False, timeout_s=60)
    assert ended.returncode != 0
    assert "waited 2 s for rank 1 while exchanging models in round 2" in ended.output


@pytest.mark.multirank
def test_the_example_learns_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def run(*arguments: str) -> list[str]:
        script = str(ROOT / "examples" / "local_sgd.py")
        status, output = run_job(
            [*launch_command("mpiexec", 2), script, *arguments],
            env={"TONARI_CACHE": str(tmp_path / "cache"), "TONARI_RANKS_PER_NODE": "1"},
            timeout_s=120,
        )
        assert status == 0, output
        return re.findall(r"(?:epoch \d|mean model): accuracy \d\.\d+", output)

    saved = f"--saved={tmp_path / 'saved'}"
    whole = run()
    assert len(whole) == 6
    assert float(whole[-1].split()[-1]) > 0.7, "each sees half of the classes"
    assert run(saved, "--epochs=2")[:2] == whole[:2]
    assert run(saved, "--resume")[-1] == whole[-1]
