"""The guarantees of an exchange, on real MPI ranks for ten epochs."""

import json

import pytest

from dataio.plan.layout import Layout
from shuffle import Partial
from tests.shuffle.epochs import check_epochs

EPOCHS = 10
SAMPLES = 83
DEALT = -1


def train(run_ranks, tmp_path, ranks, ranks_per_node, exchanges, **options):
    """Train on real ranks, and return what each of them saw, for each of the shuffles."""
    reports = run_ranks(
        "train_epochs", ranks, str(tmp_path), str(SAMPLES), str(EPOCHS), json.dumps(exchanges),
        env={"TONARI_RANKS_PER_NODE": str(ranks_per_node)}, timeout_s=90, **options,
    ).reports  # fmt: skip
    return list(zip(*reports, strict=True))


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("ranks", "replicas"),
    [
        (3, (2, 1)),
        pytest.param(4, (2, 2), marks=pytest.mark.nightly),
        pytest.param(1, (1,), marks=pytest.mark.nightly),
        pytest.param(2, (1, 1), marks=pytest.mark.nightly),
        pytest.param(3, (1, 1, 1), marks=pytest.mark.nightly),
        pytest.param(4, (3, 1), marks=pytest.mark.nightly),
    ],
)
def test_every_sample_is_owned_once_on_real_ranks(run_ranks, tmp_path, ranks, replicas):
    exchanges = [0.3, 1.0, DEALT]
    everything = train(run_ranks, tmp_path, ranks, replicas[0], exchanges)
    for exchange, histories in zip(exchanges, everything, strict=True):
        check_epochs(histories, replicas, num_samples=SAMPLES)
        if exchange != DEALT:
            leaving = Partial(exchange).num_leaving(Layout(replicas, SAMPLES))
            assert leaving > 0 or len(replicas) == 1
            for history in histories:
                exchanged = [seen["exchanged"] for seen in history]
                assert exchanged == [epoch * leaving for epoch in range(EPOCHS)]


@pytest.mark.multirank
@pytest.mark.nightly
def test_torch_and_mpi_worlds_come_to_hold_the_same_rows(run_ranks, tmp_path):
    found = {}
    for launcher in ("mpiexec", "torchrun"):
        (tmp_path / launcher).mkdir()
        place = tmp_path / launcher
        (histories,) = train(run_ranks, place, 3, 2, [0.3], launcher=launcher, fresh=True)
        check_epochs(histories, (2, 1), num_samples=SAMPLES)
        found[launcher] = [[seen["ids"], seen["trained"]] for h in histories for seen in h]
    assert found["torchrun"] == found["mpiexec"]
