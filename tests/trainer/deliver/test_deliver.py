"""Every rank of a replica trains the rows that its reader read, whatever the mesh."""

import math

import pytest
import torch

from dataio.base.buffers import BufferRing
from dataio.batch.feed import DeviceDelivery
from dataio.world import run_threads, thread_worlds
from importance import InfoBatch, Kakurenbo
from tests.cases import diagonal
from tests.memory_source import MemorySource
from tests.trainer.deliver.test_deliver_faults import open_replica
from tests.trainer.mesh.meshes import EPOCHS, NUM_SAMPLES, ROWS_A_STEP, merged, run_mesh, score

MESHES = {"dp2": (1, 2, 1), "tp2": (1, 1, 2), "pp2": (2, 1, 1), "dp2tp2": (1, 2, 2),
          "pp2tp2": (2, 1, 2), "pp2dp2": (2, 2, 1), "pp4": (4, 1, 1)}  # fmt: skip
POLICIES = {
    "none": None,
    "kakurenbo": Kakurenbo(0.4, drops=(), alphas=(1.0,), warmup_epochs=0),
    "infobatch": InfoBatch(),
}
TARGETS = ("label", "sample_id", "slot", "weight")


@pytest.fixture(scope="module", params=POLICIES)
def policy(request):
    return POLICIES[request.param]


@pytest.fixture(scope="module")
def one(policy, tmp_path_factory):
    return run_mesh(tmp_path_factory.mktemp("one"), (1, 1, 1), importance=policy)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_the_same_rows_in_a_step(tmp_path, one, policy, mesh):
    runs = run_mesh(tmp_path, MESHES[mesh], importance=policy)
    assert merged(runs) == merged(one)
    if policy is POLICIES["kakurenbo"]:
        assert any(kind == "refresh" for _, kind, *_ in one[0].steps)
    for run in runs:
        # All that own the last stage see what the scorer sees.
        scorer = runs[run.place.scorer]
        assert run.steps == (scorer.steps if run.place.has_target else [])
        assert run.last_step == one[0].last_step


@pytest.mark.parametrize(("name", "needed"), [("kakurenbo", True), ("infobatch", False)])
def test_every_rank_knows_whether_the_policy_goes_by_outcomes(tmp_path, name, needed):
    def rank(world):
        with open_replica(world, tmp_path, importance=POLICIES[name]) as loader:
            return loader.needs_outcome

    assert run_threads(thread_worlds([2]), rank) == [needed, needed]


def test_mean_losses_reach_the_reader_to_the_last_bit(tmp_path):
    one = run_mesh(tmp_path / "one", (1, 1, 1))
    pipeline = run_mesh(tmp_path / "pipeline", (2, 1, 2))
    assert pipeline[0].losses == one[0].losses
    assert one[0].losses[0] is None
    assert None not in one[0].losses[1:]
    assert all(set(run.losses) == {None} for run in pipeline[1:])


@pytest.mark.parametrize("mesh", ["one", "pp2"])
def test_the_mean_loss_is_that_of_the_weighted_rows_of_the_steps_padding_included(
    tmp_path, policy, mesh
):
    (run, *others) = run_mesh(tmp_path, MESHES.get(mesh, (1, 1, 1)), importance=policy)
    steps = others[-1].steps if others else run.steps
    for epoch in range(EPOCHS - 1):
        means = [
            sum(weight * float(score(torch.tensor([i]), epoch)[0]) for i, weight in rows)
            for at, kind, _, rows in steps
            if (at, kind) == (epoch, "train")
        ]
        expected = sum(means) / len(means) / ROWS_A_STEP
        assert run.losses[epoch + 1] == pytest.approx(expected, rel=1e-6)


def test_what_is_staged_is_waited_for_without_limit(tmp_path):
    def rank(world):
        limits, wait = [], world.wait

        def noted(requests, *, peers, doing, timeout_s=None):
            if doing == "waiting for a state":
                limits.append(timeout_s)
            wait(requests, peers=peers, doing=doing, timeout_s=timeout_s)

        world.wait = noted
        with open_replica(world, tmp_path) as loader:
            loader.evaluation(MemorySource(9, name="test"))
            loader.save(tmp_path / "saved")
            world.barrier(doing="saving")
            loader.restore(tmp_path / "saved")
        return limits

    assert run_threads(thread_worlds([2]), rank) == [[], 3 * [math.inf]]


@diagonal(nodes=[(4,), (2, 2), (1, 1, 1, 1)], schedule=["1f1b", "zbv"])
def test_columns_go_only_where_they_are_needed(tmp_path, nodes, schedule):
    runs = run_mesh(tmp_path, (4, 1, 1), nodes=nodes, schedule=schedule)
    everything = tuple(sorted((*TARGETS, "pixels")))
    first, last = (everything, ()) if schedule == "zbv" else (("pixels",), TARGETS)
    assert [run.columns for run in runs] == [{first}, {()}, {()}, {last}]
    assert [run.held_bytes > 0 for run in runs] == [False, False, False, last != ()]


@pytest.mark.parametrize("nodes", [(4,), (2, 2)])
def test_each_replica_reads_each_row_once(tmp_path, nodes):
    runs = run_mesh(tmp_path, (2, 1, 2), nodes=nodes)
    assert sorted(runs[0].rows_read) == list(range(NUM_SAMPLES))
    assert [run.rows_read for run in runs[1:]] == [[], [], []]
    assert [run.delivered > 0 for run in runs] == [True, False, False, False]


@pytest.mark.parametrize("shared", [True, False])
def test_nodes_and_ways_do_not_change_what_arrives(tmp_path, shared):
    one = run_mesh(tmp_path / "one", (1, 1, 1))
    for number, nodes in enumerate([(4,), (2, 2), (3, 1)]):
        runs = run_mesh(tmp_path / f"{number}", (2, 1, 2), nodes=nodes, shared_memory=shared)
        assert merged(runs) == merged(one)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2), (2, 2, 1)])
def test_every_sample_is_evaluated_once_and_again(tmp_path, mesh):
    # Labels are what both the first stage and the last take here.
    runs = run_mesh(tmp_path, mesh, evaluates=True, inputs=("label",))
    seen = [i for run in runs if run.place.rank == run.place.scorer for i in run.evaluated]
    assert sorted(seen) == sorted(2 * list(range(37)))


def test_a_run_goes_on_step_by_step_on_other_meshes(tmp_path, policy, one):
    meshes = [(2, 1, 2), (1, 1, 1), (1, 4, 1), (1, 2, 2), (2, 2, 1)]
    steps, at = [], None
    for number, mesh in enumerate(meshes):
        last = number + 1 == len(meshes)
        save = tmp_path / f"saved{number}"
        runs = run_mesh(
            tmp_path / f"cache{number}", mesh, importance=policy, at=at, save=save,
            stop=None if last else 4,
        )  # fmt: skip
        steps += merged(runs)
        at = save
    assert steps == merged(one)


class PlainBuffers(BufferRing):
    """Memory of a ring that is asked for pinned memory, on a machine that can pin none."""

    def __init__(self, *, pinned=False):
        super().__init__()
        self.is_asked = pinned
        ASKED.append(self)


ASKED: list[PlainBuffers] = []


class DeviceOfTheHost(DeviceDelivery):
    """Delivers as to a device that copies from pinned memory: batches are copies of what it got."""

    pinned = True

    def __call__(self, batches):
        return ({name: value.clone() for name, value in batch.items()} for batch in batches)


@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 2, 2)])
def test_a_reader_with_a_device_trains_from_pinned_copies_that_come_back(
    tmp_path, monkeypatch, mesh
):
    one = run_mesh(tmp_path / "one", mesh)
    ASKED.clear()
    monkeypatch.setattr("tonari.trainer.deliver.deliver.DeviceDelivery", DeviceOfTheHost)
    for module in ("stream", "relay"):
        monkeypatch.setattr(f"tonari.trainer.deliver.{module}.BufferRing", PlainBuffers)
    runs = run_mesh(tmp_path / "pinned", mesh)
    assert merged(runs) == merged(one)
    assert [run.columns for run in runs] == [run.columns for run in one]
    for run in runs:
        for batch, copy in run.kept:
            assert all(torch.equal(batch[name], value) for name, value in copy.items())
    assert all(ring.is_asked for ring in ASKED)
    used = [ring.num_allocated for ring in ASKED if ring.num_allocated]
    assert len(used) == sum(run.columns != {()} for run in runs)
    assert max(used) <= 2, "a batch's memory comes back when the device has it"
