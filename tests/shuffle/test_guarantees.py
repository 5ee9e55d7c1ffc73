"""The guarantees of an exchange, on thread worlds: real pools, files and messages, no MPI."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.plan.layout import Layout
from dataio.rows.fields import row_schema
from dataio.rows.rows import make_rows
from dataio.store.manifest_files import ManifestFiles
from dataio.world import run_threads, thread_worlds
from shuffle import Partial
from shuffle.plan import num_leaving
from shuffle.schedule import plan_legs
from tests.memory_source import MemorySource
from tests.resumes import ResumedRun, RunJob, in_memory
from tests.shuffle.epochs import check_epochs, run_epochs

LAYOUTS = [(2, 2), (4, 3, 1), (1,), (3, 2, 2), (1, 1), (5, 1), (1, 1, 1)]


@given(
    st.sampled_from(LAYOUTS),
    st.integers(0, 60),
    st.sampled_from([0, 0.05, 0.1, 0.3, 0.7, 1.0]),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_every_sample_is_owned_once_with_its_own_bytes_and_score(
    replicas, extra, exchange, epochs, seed
):
    num_samples = sum(replicas) + extra
    with tempfile.TemporaryDirectory(dir=shm()) as root:
        histories = run(Path(root), replicas, num_samples, exchange, epochs=epochs + 1, seed=seed)
    check_epochs(histories, replicas, num_samples=num_samples)
    leaving = Partial(exchange).num_leaving(Layout(replicas, num_samples))
    for history in histories:
        # k is equal on all replicas, and each receives as many as it sends
        assert [seen["exchanged"] for seen in history] == [e * leaving for e in range(epochs + 1)]


def run(root, replicas, num_samples, exchange, *, epochs, seed, look=lambda loader: None):
    """Train on thread worlds, with the shipped loader."""
    return run_threads(
        thread_worlds(list(replicas), timeout_s=20),
        lambda world: run_epochs(
            world, root, Partial(exchange), MemorySource(num_samples), epochs=epochs, seed=seed,
            look=look,
        ),
    )  # fmt: skip


def shm():
    """Memory, where there is one: these tests write many small files durably."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def test_storage_stays_within_one_plus_two_q(tmp_path):
    num_samples, exchange = 400, 0.3
    run(tmp_path, (2, 2), num_samples, exchange, epochs=7, seed=1)
    for file in tmp_path.rglob("fixed-0.npy"):
        rows = len(np.load(file, mmap_mode="r"))
        assert rows <= (1 + 2 * exchange) * (num_samples / 2)
    assert len(list(tmp_path.rglob("fixed-0.npy"))) == 2


@pytest.mark.parametrize("epochs", [20])
def test_long_runs_rewrite_their_manifest_and_leave_nothing_behind(tmp_path, epochs):
    run(tmp_path, (1, 1), 40, 0.2, epochs=epochs + 1, seed=0)
    for node in tmp_path.rglob("node*"):
        names = [path.name for path in node.iterdir()]
        assert sum(name.startswith("base-") for name in names) == 1
        assert not [name for name in names if name.endswith(".partial")]
        assert sum(name.startswith("delta-") for name in names) <= 17


class UnevenSource(MemorySource):
    """Samples whose bytes are many and differ: from 0.2 to 8 KiB."""

    @staticmethod
    def length(sample_id):
        return 200 + 97 * sample_id * (sample_id + 5) % 7993

    @classmethod
    def payload(cls, sample_id):
        return bytes([sample_id % 251]) * cls.length(sample_id)

    def read(self, sample_ids, fields):
        for first in range(0, len(sample_ids), 64):
            ids = np.asarray(sample_ids[first : first + 64], np.int64)
            lengths = np.array([[self.length(i)] for i in ids.tolist()], np.int64)
            labels = (ids % 10).astype("<i8").view(np.uint8).reshape(len(ids), 8)
            data = np.repeat(ids % 251, lengths[:, 0]).astype(np.uint8)
            yield make_rows(row_schema(fields), ids, [labels], lengths, [data])


def allocated_bytes(directory, pattern):
    """What files take up on the disk, holes and blocks begun counted as the disk does."""
    return sum(512 * path.stat().st_blocks for path in directory.glob(pattern))


def space(root, node):
    """Bytes of a node's heaps and of its fixed arrays on disk."""
    (directory,) = root.glob(f"*/node{node}")
    return allocated_bytes(directory, "heap-*.bin"), allocated_bytes(directory, "fixed-0.npy")


def test_no_file_is_removed_that_the_manifest_on_disk_names(tmp_path, monkeypatch):
    """A kill at that moment would leave a cache that cannot be read."""
    removed, needed = list[str](), list[str]()
    unlink = ManifestFiles.unlink

    def looked_at(files, names):
        head = files.read_head()
        needed.extend(set(names) & {*(head.named if head is not None else ())})
        removed.extend(names)
        unlink(files, names)

    monkeypatch.setattr(ManifestFiles, "unlink", looked_at)
    monkeypatch.setattr("dataio.store.commit_log.DELTAS_PER_BASE", 2)
    epochs = 8
    run = ResumedRun(tmp_path / "run", in_memory(61, epochs), {"shuffle": Partial(0.4)}, epochs)
    run.start(RunJob((1, 1)))
    assert {name.split("-")[0] for name in removed} >= {"base", "delta"}
    assert needed == []


@pytest.mark.parametrize("exchange", [0.1, pytest.param(0.3, marks=pytest.mark.nightly)])
def test_disk_space_stays_within_one_plus_two_q_over_fifty_epochs(exchange):
    replicas, num_samples = (2, 1, 2), 800
    with tempfile.TemporaryDirectory(dir=shm()) as root:
        histories = run_threads(
            thread_worlds(list(replicas), timeout_s=60),
            lambda world: run_epochs(
                world, Path(root), Partial(exchange), UnevenSource(num_samples), epochs=51, seed=7,
                look=lambda loader: space(Path(root), world.node),
            ),
        )  # fmt: skip
    check_epochs(histories, replicas, num_samples=num_samples)
    for history in (histories[0], histories[2], histories[3]):
        largest_heap, largest_fixed = np.max([seen["seen"] for seen in history[1:]], axis=0)
        payload_bytes = max(sum(map(UnevenSource.length, seen["ids"])) for seen in history[1:])
        # A fragmented heap takes up to a quarter more, an eighth of which it has grown ahead
        assert payload_bytes < largest_heap <= 1.25 * (1 + 2 * exchange) * payload_bytes
        # 8 bytes a row, a header and the rest of a page
        rows = len(history[0]["ids"])
        assert 8 * rows < largest_fixed <= 8 * rows * (1 + 2 * exchange) + 2 * 4096


@pytest.mark.parametrize(
    "replicas",
    [
        (3, 1, 2),
        pytest.param((5, 1), marks=pytest.mark.nightly),
        pytest.param((1, 4, 1, 1), marks=pytest.mark.nightly),
        (1, 1, 1),
    ],
)
def test_the_trace_says_what_caches_hold_after_each_of_twenty_epochs(tmp_path, replicas):
    num_samples = 29 * sum(replicas) + 3
    histories = run(
        tmp_path, replicas, num_samples, 0.3, epochs=21, seed=7,
        look=lambda loader: loader._session.pool.cache.entries.sample_id.tolist(),
    )  # fmt: skip
    check_epochs(histories, replicas, num_samples=num_samples)
    for history in histories:
        assert [seen["seen"] for seen in history] == [seen["traced"] for seen in history]
    assert histories[0][0]["ids"] != histories[0][-1]["ids"], "rows moved"


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=6),
    st.integers(0, 500),
    st.sampled_from([0.05, 0.3, 1.0]),
    st.integers(0, 50),
)
def test_messages_balance_and_leave_the_node_on_uneven_layouts(widths, extra, exchange, epoch):
    layout = Layout(tuple(widths), 20 * sum(widths) + extra)
    leaving, received = num_leaving(layout, exchange), np.zeros(layout.num_replicas, int)
    for replica in range(layout.num_replicas):
        legs = plan_legs(
            layout, replica=replica, num_leaving=leaving, seed=1, epoch=epoch, steps=range(9),
            mean_row_bytes=10**7, first_tag=0,
        )  # fmt: skip
        assert sum(leg.stop - leg.start for leg in legs) == leaving
        for leg in legs:
            received[leg.dest] += leg.stop - leg.start
            if 2 * max(widths) <= layout.num_replicas:
                assert layout.node_of(leg.dest) != layout.node_of(replica)
                assert layout.node_of(leg.source) != layout.node_of(replica)
            assert replica not in (leg.dest, leg.source)
    assert set(received.tolist()) == {leaving}
