"""What is measured on each rank is combined once a replica, whatever the mesh."""

import json
from functools import partial

import pytest
import torch

from dataio.world import World, run_threads, single_world, thread_worlds
from tests.stand_ins import SetClock
from tonari.trainer.mesh.place import place_of
from tonari.trainer.watch import meter
from tonari.trainer.watch.meter import BY_CAUSE, Figures, Meter, combine_order_hashes

MESH = (2, 2, 1, 1, 2)
"""Readers are ranks 0 and 2, scorers 4 and 6; each has a tp peer."""

BATCH = {"sample_id": torch.tensor([5, 8, -1, -1])}
"""Two rows, and two of padding."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    made = SetClock(100.0)
    monkeypatch.setattr(meter, "time", made)
    return made


def place(world: World, sizes: tuple[int, ...] = MESH):
    return place_of(world.rank, sizes, schedule="1f1b", virtual=1)


def stats(replica: int) -> dict[str, float]:
    """Figures of a reader's loader; a replica's differ from another's."""
    return {
        "wait_s": 1.0 + replica, "staging_s": 5.0 - replica, "exchanged_rows": 10 + replica,
        "exchange_blocked_s": 2.0 + replica, "wait_decode_s": 0.5 + replica,
        "source_bytes": 100.0, "hidden_fraction": 0.2 + 0.2 * replica,
        "exchange_overlap_fraction": 1.0 - 0.5 * replica,
    }  # fmt: skip


def test_a_replica_counts_once_however_many_ranks_it_has(clock: SetClock) -> None:
    clock.now = 0.0

    def run(world: World) -> tuple[Figures, Figures]:
        here = place(world)
        # Peers have no losses, and other figures than their reader, which must not count.
        told = stats(here.replica) if here.reads else {}
        meter = Meter({"source_bytes": 40.0} if here.reads else {}, here)
        for _ in range(3):
            # A stage between the first and the last gets no columns.
            meter.add(BATCH if here.has_target or here.reads else {})
        world.barrier(doing="starting together")
        clock.now = 10.0
        loss = 1.0 + here.replica if here.reads else 77.0
        return meter.recent(loss, told, world), meter.epoch_line(0.0, told, world)

    for recent, epoch in run_threads(thread_worlds((8,)), run):
        assert recent == {
            "loss": 1.5, "samples_per_s": 1.2, "wait_fraction": pytest.approx(0.15),
            "hidden_fraction": pytest.approx(0.3), "exchange_overlap_fraction": 0.75,
        }  # fmt: skip
        assert epoch == {
            "loss": 1.5, "epoch_s": 10.0, "train_samples_per_s": 1.2, "wait_s": 2.0,
            "staging_s": 5.0, "exchanged_rows": 21, "source_bytes": 120,
            "hidden_fraction": pytest.approx(0.3), "exchange_overlap_fraction": 0.75,
            "exchange_blocked_s": 3.0, **dict.fromkeys(BY_CAUSE, 0.0), "wait_decode_s": 1.5,
        }  # fmt: skip


def test_the_recent_steps_are_those_since_the_last_question_and_the_epoch_is_all(
    clock: SetClock,
) -> None:
    world = single_world()
    meter = Meter({"wait_s": 2.0, "staging_s": 3.0}, place(world, (1,) * 5))
    for _ in range(3):
        meter.add(BATCH)
    clock.now += 2.0
    first = meter.recent(1.0, {"wait_s": 2.5}, world)
    assert (first["loss"], first["samples_per_s"], first["wait_fraction"]) == (1.0, 3.0, 0.25)
    meter.add(BATCH)
    clock.now += 4.0
    second = meter.recent(5.0, {"wait_s": 3.5}, world)
    assert (second["loss"], second["samples_per_s"], second["wait_fraction"]) == (5.0, 0.5, 0.25)
    clock.now += 1.0
    assert meter.recent(0.0, {"wait_s": 9.0}, world)["loss"] is None, "there was no batch"
    meter.add(BATCH)
    clock.now += 3.0
    epoch = meter.epoch_line(2.0, {"wait_s": 9.5, "staging_s": 3.0}, world)
    assert (epoch["loss"], epoch["epoch_s"], epoch["train_samples_per_s"]) == (2.0, 10.0, 1.0)
    assert (epoch["wait_s"], epoch["staging_s"]) == (7.5, 0.0)


def test_an_epoch_is_told_whole_whenever_it_was_interrupted(clock: SetClock) -> None:
    """Twice, and on one replica more each time: only sums go on."""

    def start(
        world: World, so_far: dict[str, float], loss: float
    ) -> tuple[dict[str, float], Figures]:
        here = place(world, (1, world.world_size, 1, 1, 1))
        meter = Meter({"wait_s": 1.0}, here)
        meter.go_on(json.loads(json.dumps(so_far)))
        world.barrier(doing="starting together")
        clock.now = 105.0
        meter.add(BATCH)
        meter.recent(loss, {"wait_s": 1.5}, world)
        for _ in range(3):
            meter.add(BATCH)
        world.barrier(doing="training")
        clock.now = 110.0
        after = {
            "wait_s": 3.0, "staging_s": 2.0, "exchanged_rows": 7, "source_bytes": 9.0,
            "exchange_overlap_fraction": 0.0 if so_far else 0.5, "hidden_fraction": 0.25,
        }  # fmt: skip
        told = meter.so_far(loss, after, world)
        # Steps go on after a save, and their loss is counted once.
        assert meter.so_far(77.0, after, world) == told
        clock.now = 110.0 + 1e-9
        assert meter.recent(77.0, after, world)["loss"] == pytest.approx(loss)
        world.barrier(doing="looking")
        clock.now = 110.0
        return told, meter.epoch_line(0.0, after, world)

    so_far: dict[str, float] = {}
    for num_replicas, loss in ((1, 6.0), (2, 3.0), (3, 1.0)):
        clock.now = 100.0
        run = partial(start, so_far=so_far, loss=loss)
        (so_far, line), *others = run_threads(thread_worlds((1,) * num_replicas), run)
        assert all(other == (so_far, line) for other in others)
    assert line == {
        "loss": pytest.approx((6 + 2 * 3 + 3 * 1) / 6), "epoch_s": 30.0, "wait_s": 6.0,
        "staging_s": 6.0, "train_samples_per_s": 4 * 2 * 6 / 30, "exchanged_rows": 42,
        "source_bytes": 54, "hidden_fraction": 0.25, "exchange_overlap_fraction": 0.5,
        "exchange_blocked_s": 0.0, **dict.fromkeys(BY_CAUSE, 0.0),
    }  # fmt: skip


def test_time_waited_is_at_most_the_time_that_passed(clock: SetClock) -> None:
    meter = Meter({}, place(single_world(), (1,) * 5))
    clock.now += 1.0
    assert meter.recent(0.0, {"wait_s": 1.01}, single_world())["wait_fraction"] == 1.0


def test_the_order_is_that_of_the_replicas_and_not_of_the_ranks_beside_them() -> None:
    def combined(sizes: tuple[int, ...], orders: tuple[str, str]) -> str:
        def run(world: World) -> str:
            here = place(world, sizes)
            return combine_order_hashes(orders[here.replica] if here.reads else "", world, here)

        (one,) = set(run_threads(thread_worlds((4,)), run))
        return one

    narrow, wide = (1, 2, 1, 1, 2), (2, 2, 1, 1, 1)
    assert combined(narrow, ("a", "b")) == combined(wide, ("a", "b"))
    assert combined(narrow, ("a", "b")) != combined(narrow, ("b", "a"))
    assert combined(narrow, ("a", "b")) != combined(narrow, ("a", "c"))


@pytest.mark.parametrize("first", [0, 3, 7])
def test_the_loss_of_a_step_is_the_same_to_the_last_bit_wherever_its_start_began(
    clock: SetClock, first: int
) -> None:
    losses = [1 / 3 + number / 7 for number in range(12)]
    world = single_world()

    def told(first: int) -> list[float | None]:
        made = Meter({}, place(world, (1, 1, 1, 1, 1)))
        found = []
        for loss in losses[first:]:
            made.add(BATCH)
            clock.now += 1
            found.append(made.recent(loss, {}, world)["loss"])
        return found

    assert told(first) == told(0)[first:] == losses[first:]
