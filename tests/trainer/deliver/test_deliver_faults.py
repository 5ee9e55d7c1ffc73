"""What goes wrong between the ranks of a replica is found, named, and leaves nobody waiting."""

import importlib.util
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dataio import Loader, Reports, Workers
from dataio.base.errors import SourceError, StallError, WorldError
from dataio.world import run_threads, thread_worlds
from tests.memory_source import FIELDS, MemorySource
from tests.trainer.mesh.meshes import TARGETS, add_pixels, merged, run_mesh, score
from tonari.trainer.deliver.columns import Columns, lay_columns
from tonari.trainer.deliver.deliver import ReplicaLoader
from tonari.trainer.deliver.ring import NUM_SLOTS, Ring
from tonari.trainer.errors import DeliveryError
from tonari.trainer.mesh.place import place_of

PIPELINE = (2, 1, 1)


def open_replica(
    world, root, *, sizes=PIPELINE, batch_transform=add_pixels, inputs=("pixels",), importance=None
):
    """A loader on one rank of a mesh of (pp, dp, tp) ranks."""
    pp, dp, tp = sizes
    place = place_of(world.rank, (pp, dp, 1, 1, tp), schedule="1f1b", virtual=1)

    def open_loader(readers, device, columns):
        return Loader(
            MemorySource(48), batch_size=8, fields=FIELDS, cache=root, world=readers,
            device=device, batch_transform=batch_transform, workers=Workers(threads=0),
            importance=importance, reports=Reports(progress=False),
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
        next(batches)  # handed on ahead
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


def test_what_was_let_go_may_be_written_over_at_once(tmp_path, monkeypatch):
    written: list[Ring] = []
    create, let_go = Ring.create, Ring.let_go

    def record(slot_bytes: int) -> Ring:
        written.append(create(slot_bytes))
        return written[-1]

    def let_go_and_lose(ring: Ring, peer: int, number: int) -> None:
        let_go(ring, peer, number)
        if number:
            written[-1].slot(number)[:] = 0xEE

    monkeypatch.setattr(Ring, "create", record)
    monkeypatch.setattr(Ring, "let_go", let_go_and_lose)
    # The guard compares what arrived.
    for run in run_mesh(tmp_path, (1, 1, 2), inputs=("pixels", "label")):
        assert run.kept
        for batch, copy in run.kept:
            assert all(torch.equal(batch[name], value) for name, value in copy.items())


def test_a_reader_is_as_far_ahead_of_the_slowest_peer_as_there_are_slots(tmp_path):
    told = threading.Event()

    def rank(world):
        loader = open_replica(world, tmp_path, sizes=(1, 1, 3))
        next(loader.epochs(1))
        batches = iter(loader)
        next(batches)
        if world.rank == 2:
            assert told.wait(20)
            return loader.step, ""
        with pytest.raises((StallError, DeliveryError)) as error:
            list(batches)
        told.set()
        return loader.step, str(error.value)

    (_, said), (step, _), _ = run_threads(thread_worlds([3], timeout_s=0.5), rank)
    # Of six batches an epoch the slow one took the first.
    assert step == 1 + NUM_SLOTS
    assert "rank 2" in said
    assert "waiting for an earlier batch to be let go" in said


@pytest.mark.parametrize("shared", [True, False])
def test_long_batches_go_in_windows_and_to_more_peers_than_share_memory(
    tmp_path, monkeypatch, shared
):
    # A batch of 12 rows is 1,000 bytes: more than two windows of eight segments.
    monkeypatch.setattr("tonari.trainer.deliver.relay.SEGMENT_BYTES", 48)
    monkeypatch.setattr("tonari.trainer.deliver.relay.MAX_PEERS", 1)
    one = run_mesh(tmp_path / "one", (1, 1, 1))
    runs = run_mesh(tmp_path / "several", (1, 1, 3), shared_memory=shared)
    assert merged(runs) == merged(one)
    assert all(run.steps == one[0].steps for run in runs)
    messages = [size for dest, size in runs[0].sent if dest == 2]
    # Beside the first, which describes the columns.
    assert set(messages[1:]) > {48}
    assert max(messages[1:]) == 48


def test_the_slots_begin_where_a_kernel_of_long_pages_can_map_them(monkeypatch):
    monkeypatch.setattr("mmap.ALLOCATIONGRANULARITY", 1 << 16)
    spec = importlib.util.find_spec("tonari.trainer.deliver.ring")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ring = module.Ring.create(100)
    ring.unlink()
    assert module.CONTROL_BYTES == 1 << 16
    for number in range(1, 4):
        ring.slot(number)[:] = number
    ring.let_go(module.MAX_PEERS - 1, 1)
    assert ring.has_let_go(module.MAX_PEERS - 1, 1)
    assert not ring.has_let_go(0, 0)


def test_too_little_shared_memory_is_said_before_anything_is_written(monkeypatch):
    def full(descriptor, first, num_bytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(DeliveryError, match=r"cannot take .* bytes for 4 batches.*--shm-size"):
        Ring.create(100)
