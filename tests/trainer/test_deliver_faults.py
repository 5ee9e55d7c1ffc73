"""What goes wrong between the ranks of a replica is found, named, and leaves nobody waiting."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dataio import Loader
from dataio.errors import SourceError, StallError, WorldError
from dataio.world import run_threads, thread_worlds
from tests.memory_source import FIELDS, MemorySource
from tests.trainer.meshes import TARGETS, add_pixels, run_mesh, score
from trainer.deliver import ReplicaLoader
from trainer.deliver_columns import Columns, lay_columns
from trainer.deliver_ring import NUM_SLOTS, Ring
from trainer.errors import DeliveryError
from trainer.place import place_of

PIPELINE = (2, 1, 1)


def open_replica(world, root, *, sizes=PIPELINE, batch_transform=add_pixels, inputs=("pixels",)):
    """A loader on one rank of a mesh of (pp, dp, tp) ranks."""
    pp, dp, tp = sizes
    place = place_of(world.rank, (pp, dp, 1, 1, tp), schedule="1f1b", virtual=1)

    def open_loader(readers, device):
        return Loader(
            MemorySource(48), batch_size=8, fields=FIELDS, cache=root, world=readers,
            device=device, batch_transform=batch_transform, num_threads=0, progress=False,
        )  # fmt: skip

    return ReplicaLoader(open_loader, world=world, place=place, inputs=inputs, targets=TARGETS)


@pytest.mark.parametrize("shared", [True, False])
def test_a_kept_batch_never_changes(tmp_path, shared):
    for run in run_mesh(tmp_path, (2, 1, 2), shared_memory=shared):
        assert run.kept
        for batch, copy in run.kept:
            assert all(torch.equal(batch[name], value) for name, value in copy.items())


def test_bytes_that_differ_from_those_read_are_found(tmp_path, monkeypatch):
    whole = Ring.slot

    def damaged(ring, number):
        slot = whole(ring, number)
        if number == 5 and not slot.flags.writeable:
            slot = slot.copy()
            slot[7] ^= 1
        return slot

    monkeypatch.setattr(Ring, "slot", damaged)
    found = r"\[rank 1\] replica 0, step 4: the bytes.*rank 0 read.*start again"
    with pytest.raises(DeliveryError, match=found):
        run_mesh(tmp_path / "guarded", (1, 1, 2))
    run_mesh(tmp_path / "free", (1, 1, 2), guard=False)


def test_a_reader_that_stalls_is_named_within_the_limit(tmp_path):
    told = threading.Event()

    def rank(world):
        loader = open_replica(world, tmp_path)
        next(loader.epochs(1))
        batches = iter(loader)
        next(batches)
        if world.rank == 0:
            assert told.wait(20)
            return ""
        with pytest.raises(StallError) as error:
            next(batches)
        told.set()
        return str(error.value)

    said = run_threads(thread_worlds([2], timeout_s=0.3), rank)[1]
    assert "rank 0" in said
    assert "waiting for a batch" in said


def test_a_scorer_that_stalls_is_named_within_the_limit(tmp_path):
    told = threading.Event()

    def rank(world):
        loader = open_replica(world, tmp_path)
        next(loader.epochs(1))
        next(iter(loader))
        if world.rank == 1:
            assert told.wait(20)
            return ""
        with pytest.raises(StallError) as error:
            loader.mean_loss()
        told.set()
        return str(error.value)

    said = run_threads(thread_worlds([2], timeout_s=0.3), rank)[0]
    assert "rank 1" in said
    assert "losses" in said


def test_peers_of_a_reader_that_cannot_read_end_with_it(tmp_path, monkeypatch):
    def fail(self, sample_ids, fields):
        raise SourceError("the disk is gone")
        yield

    monkeypatch.setattr(MemorySource, "read", fail)
    started = time.monotonic()
    with pytest.raises((SourceError, WorldError), match="the disk is gone"):
        run_mesh(tmp_path, (2, 1, 2))
    assert time.monotonic() - started < 10


def test_batches_that_nobody_scores_hold_up_nobody(tmp_path):
    def rank(world):
        with open_replica(world, tmp_path) as loader:
            means = []
            for _ in loader.epochs(2):
                for number, batch in enumerate(loader):
                    if number % 2 and world.rank == 1:
                        loader.report(batch, *score(batch["sample_id"], 0))
                means.append(loader.mean_loss())
            return means

    reader, scorer = run_threads(thread_worlds([2]), rank)
    assert None not in reader
    assert scorer == [None, None]


def test_a_batch_reported_twice_is_refused(tmp_path):
    def rank(world):
        with open_replica(world, tmp_path) as loader:
            for _ in loader.epochs(1):
                for batch in loader:
                    if world.rank == 1:
                        told = score(batch["sample_id"], 0)
                        loader.report(batch, *told)
                        with pytest.raises(ValueError, match="once"):
                            loader.report(batch, *told)
                        with pytest.raises(ValueError, match="one value a row"):
                            loader.report(batch, told[0][1:], *told[1:])

    run_threads(thread_worlds([2]), rank)


def test_a_loop_that_breaks_off_goes_on_with_the_next_batch(tmp_path):
    def rank(world):
        seen = []
        with open_replica(world, tmp_path, inputs=("label",)) as loader:
            for _ in loader.epochs(1):
                for batch in loader:
                    seen.append((loader.step, sorted(batch)))
                    if loader.step == 2:
                        break
                for batch in loader:
                    seen.append((loader.step, sorted(batch)))
        return [step for step, _ in seen]

    assert run_threads(thread_worlds([2]), rank) == [[1, 2, 3, 4, 5, 6]] * 2


def test_ranks_in_different_loops_are_told_so(tmp_path, monkeypatch):
    def rank(world):
        loader = open_replica(world, tmp_path)
        next(loader.epochs(1))
        if world.rank == 0:
            with pytest.raises(StallError, match="rank 1"):
                next(iter(loader))
            return
        with pytest.raises(DeliveryError, match=r"announced a batch, expected a state.*same loop"):
            loader.restore(tmp_path)

    rings: list[Ring] = []
    create = Ring.create

    def record(slot_bytes: int) -> Ring:
        rings.append(create(slot_bytes))
        return rings[-1]

    monkeypatch.setattr(Ring, "create", record)
    run_threads(thread_worlds([2], timeout_s=0.5), rank)
    assert [ring.path.exists() for ring in rings] == [False]


def test_columns_without_a_fixed_shape_are_refused():
    batch = {"data": [b"1"], "label": torch.arange(2)}
    with pytest.raises(DeliveryError, match=r"'data' is list.*fixed shape"):
        lay_columns(batch, inputs=["data"], targets=["label"])
    columns = lay_columns(batch, inputs=["label"], targets=[])
    memory = np.empty(columns.num_bytes, np.uint8)
    with pytest.raises(DeliveryError, match=r"replica 0: column 'label'.*\(3,\).*pad"):
        columns.write({"label": torch.arange(3)}, memory, where="replica 0")


def test_columns_come_back_as_they_were_written():
    batch = {
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "image": torch.arange(120, dtype=torch.uint8).view(2, 4, 5, 3).permute(0, 3, 1, 2),
        "half": torch.arange(7).bfloat16(),
        "flags": torch.tensor([True, False]),
        "ids": torch.arange(5),
        "unused": torch.zeros(1),
    }
    columns = lay_columns(
        batch, inputs=["image", "ids"], targets=["ids", "half", "scalar", "flags"]
    )
    columns = Columns.from_json(columns.to_json())
    memory = np.empty(columns.num_bytes, np.uint8)
    columns.write(batch, memory, where="")
    for wanted, names in (
        (("input",), {"image", "ids"}),
        (("target",), {"ids", "half", "scalar", "flags"}),
    ):
        span = columns.span(*wanted)
        found = columns.read(memory[span.start : span.stop].copy(), *wanted)
        assert set(found) == names
        for name, value in found.items():
            assert torch.equal(value, batch[name])
            assert (value.dtype, value.stride()) == (batch[name].dtype, batch[name].stride())


def test_a_slot_is_free_when_all_have_let_it_go():
    ring = Ring.create(100)
    peers = [Ring(ring.path, 100, writes=False) for _ in range(2)]
    assert not ring.has_let_go(0, 0)
    ring.unlink()
    assert not Path(ring.path).exists()
    for number in range(1, 2 * NUM_SLOTS):
        ring.slot(number)[:] = number
        assert all((peer.slot(number) == number).all() for peer in peers)
    peers[1].let_go(1, 3)
    assert ring.has_let_go(1, 3)
    assert not ring.has_let_go(1, 4)
    assert not ring.has_let_go(0, 1)


def test_too_little_shared_memory_is_said_before_anything_is_written(monkeypatch):
    def full(descriptor, first, num_bytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(DeliveryError, match=r"cannot take .* bytes for 4 batches.*--shm-size"):
        Ring.create(100)
