"""Rows beyond memory are read ahead, into memory of their own: those of the batches alone."""

import errno
import os
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event, current_thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.base.errors import CacheError, CorruptRowError, StallError
from dataio.rows.fields import Array
from dataio.rows.rows import empty_rows
from dataio.store.files import fetch as fetch_module
from dataio.store.files.fetch import PAGE_BYTES, Fetch, Fetcher
from dataio.store.files.reader import RowReader, exceeds_memory, locate
from dataio.store.files.store import HeapFile
from tests.cases import diagonal
from tests.dataio.batch.gather_pool import FIELDS, gathered, open_pool, pick_in_turn
from tests.dataio.batch.test_gather import assert_same
from tests.opened import make_gather

KINDS = {**FIELDS, "wide": Array("wide", (3000,), "uint8")}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with open_pool(tmp_path_factory.mktemp("pool"), KINDS) as pool:
        yield pool


@pytest.fixture
def fetcher(pool):
    fetcher = Fetcher(reader_of(pool))
    yield fetcher
    fetcher.close()


@pytest.fixture
def beyond_memory(monkeypatch):
    monkeypatch.setattr("dataio.store.cache.exceeds_memory", lambda reader, **_: True)


def reader_of(pool):
    return RowReader(pool.cache.schema, pool.cache.files.fixed, pool.cache.directory)


def test_it_is_off_while_memory_holds_the_pool(pool):
    assert not exceeds_memory(reader_of(pool))
    assert exceeds_memory(reader_of(pool), memory_bytes=1000)


@pytest.fixture(scope="module")
def two_heaps(pool):
    """Have a second heap, of the same bytes; it ends in the middle of a page."""
    end = int((pool.cache.entries.offset[:] + pool.cache.entries.extent_bytes[:]).max())
    heap = (pool.cache.directory / "heap-0.bin").read_bytes()[:end]
    assert end % PAGE_BYTES
    (pool.cache.directory / "heap-1.bin").write_bytes(heap)


@given(
    drawn=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 1)), max_size=40),
    short_bytes=st.sampled_from([0, 1 << 14]),
    piece_bytes=st.sampled_from([3, 1000, 1 << 20]),
    knows_small=st.booleans(),
)
def test_fetched_rows_are_the_rows(
    pool, fetcher, two_heaps, drawn, short_bytes, piece_bytes, knows_small
):
    cache = pool.cache
    slots, heaps = np.array(drawn, np.int64).reshape(-1, 2).T
    located = locate(cache.entries, slots)._replace(heap=heaps)
    small = {"label": reader_of(pool).column(label(pool))[located.position]} if knows_small else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dataio.store.files.fetch.PIECE_BYTES", piece_bytes)
        patch.setattr("dataio.store.files.fetch.SHORT_BYTES", short_bytes)
        reader, there = fetcher.fetch(located, small).result(10)
    into = empty_rows(cache.schema, cache.entries.lengths[slots])
    reader.read_into(there, into)
    expected = cache.read_rows(slots)
    for column, other in zip(
        into.fixed + into.variable, expected.fixed + expected.variable, strict=True
    ):
        assert np.array_equal(column, other)
    assert np.array_equal(reader.checksums(there), expected.checksum)


def label(pool):
    return [column.name for column in pool.cache.schema.fixed].index("label")


@diagonal(num_threads=[0, 2], short=[True, False])
def test_each_row_is_read_once_and_nothing_beside_it(
    pool, monkeypatch, beyond_memory, num_threads, short
):
    with monkeypatch.context() as plain:
        plain.setattr("dataio.store.cache.exceeds_memory", lambda reader, **_: False)
        expected = gathered(pool, KINDS)
    if not short:
        monkeypatch.setattr(fetch_module, "SHORT_BYTES", 0)
    read = noted(monkeypatch)
    mapped = counted(monkeypatch, HeapFile, "view")
    assert_same(gathered(pool, KINDS, num_threads=num_threads), expected)
    entries, caller = pool.cache.entries, current_thread().name
    wanted = extents(
        pool.cache.directory / "heap-0.bin", entries.offset[:], entries.extent_bytes[:]
    )
    assert short or not mapped
    for file in pool.cache.files.fixed:
        width = file.column.width_bytes
        if width > 64:  # narrower ones are gathered for many batches at once
            starts = file.start_bytes + entries.position[:] * width
            wanted |= extents(file.path, starts, np.full(len(starts), width))
    found = [(path, a, b) for path, a, b, _ in read]
    unit = PAGE_BYTES if short else 1
    assert units(found, unit) == units(wanted, unit)
    assert short or sum(b - a for _, a, b in found) == len(units(wanted, 1)), "each of them once"
    assert caller not in {thread for *_, thread in read}


def extents(path, start, num_bytes):
    """Say where a file is to be read."""
    return {(path, a, a + n) for a, n in zip(start.tolist(), num_bytes.tolist(), strict=True) if n}


def units(parts, unit):
    """List every byte, or every page."""
    return {(path, byte // unit) for path, a, b in parts for byte in range(a, b)}


def noted(monkeypatch):
    """List what is read from now on: file, first byte, past the last, and the thread."""
    read: list[tuple[Path, int, int, str]] = []
    preadv, take = os.preadv, fetch_module.take_rows

    def note(descriptor, buffers, offset):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        read.append((path, offset, offset + sum(map(len, buffers)), current_thread().name))
        return preadv(descriptor, buffers, offset)

    def note_rows(rows, numbers, into):
        base = rows
        while not isinstance(base, np.memmap):
            base = base.base
        start = rows.ctypes.data - base.ctypes.data + base.offset
        width = rows.shape[1]
        read.extend(
            (
                Path(str(base.filename)),
                start + n * width,
                start + (n + 1) * width,
                current_thread().name,
            )
            for n in numbers.tolist()
        )
        take(rows, numbers, into)

    monkeypatch.setattr("dataio.store.files.fetch.os.preadv", note)
    monkeypatch.setattr(fetch_module, "take_rows", note_rows)
    return read


def test_batches_are_fetched_ahead_from_one_block_of_steps_to_the_next(
    pool, monkeypatch, beyond_memory
):
    monkeypatch.setattr("dataio.batch.lookup.AHEAD", 2)
    assert ahead(pool, monkeypatch) == [2, 2, 2, 1, 0]


def test_no_more_is_fetched_ahead_than_memory_is_for_but_one_batch(
    pool, monkeypatch, beyond_memory
):
    batch_bytes = sum(pool.cache.entries.extent_bytes[:]) / 5 + 8 * pool.cache.schema.fixed_bytes
    monkeypatch.setattr("dataio.batch.lookup.AHEAD_BYTES", 3.5 * batch_bytes)
    assert ahead(pool, monkeypatch) == [3, 3, 2, 1, 0]
    monkeypatch.setattr("dataio.batch.lookup.AHEAD_BYTES", 1)
    assert ahead(pool, monkeypatch) == [1, 1, 1, 1, 0]


def test_ranks_of_a_node_share_the_memory_that_is_for_batches_ahead(
    pool, monkeypatch, beyond_memory
):
    batch_bytes = sum(pool.cache.entries.extent_bytes[:]) / 5 + 8 * pool.cache.schema.fixed_bytes
    monkeypatch.setattr("dataio.batch.lookup.memory_limit", lambda: 20 * 3.5 * batch_bytes)
    assert ahead(pool, monkeypatch) == [3, 3, 2, 1, 0]
    monkeypatch.setattr(pool.cache, "local_size", 2)
    assert ahead(pool, monkeypatch) == [1, 1, 1, 1, 0]


def counted(monkeypatch, owner, name):
    """List the calls of a method that are made from now on."""
    calls, method = [], getattr(owner, name)

    def call(*args):
        calls.append(args)
        return method(*args)

    monkeypatch.setattr(owner, name, call)
    return calls


def ahead(pool, monkeypatch):
    """Batches that are fetched ahead of each. The first block has four steps."""
    with monkeypatch.context() as patch:
        asked = counted(patch, Fetcher, "fetch")
        gather = make_gather(pool, KINDS, num_threads=0)
        found = [
            len(asked) - done
            for done, _ in enumerate(gather.batches(pick_in_turn(40), range(5), epoch=1), 1)
        ]
        gather.close()
    return found


def test_leaving_in_the_middle_reads_no_more(pool, monkeypatch, beyond_memory):
    cancelled = counted(monkeypatch, Fetch, "cancel")
    gather = make_gather(pool, KINDS, num_threads=0)
    batches = gather.batches(pick_in_turn(40), range(5), epoch=0)
    next(batches)
    del batches
    assert len(cancelled) == 4
    assert len(list(gather.batches(pick_in_turn(40), range(5), epoch=0))) == 5
    gather.close()


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_file_that_was_cut_is_an_error_that_names_it(tmp_path, beyond_memory, num_threads):
    with open_pool(tmp_path, KINDS) as pool:
        # The mapped columns are not touched
        os.truncate(pool.cache.directory / "heap-0.bin", 100)
        with pytest.raises(
            CacheError, match=r"heap-0.bin: is 100 bytes long.*stages these rows again"
        ):
            gathered(pool, KINDS, num_threads=num_threads)


def test_a_disk_that_fails_is_an_error_that_names_the_cache(pool, monkeypatch, beyond_memory):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fetch_module, "SHORT_BYTES", 0)
    monkeypatch.setattr("dataio.store.files.fetch.os.preadv", fail)
    with pytest.raises(CacheError, match=rf"{pool.cache.directory}: could not read .*look at the"):
        gathered(pool, KINDS)


def test_a_disk_that_hangs_is_an_error_after_a_while(pool, monkeypatch, fetcher):
    waits = held(monkeypatch)
    fetch = fetcher.fetch(locate(pool.cache.entries, np.arange(8)))
    with pytest.raises(StallError, match=rf"{pool.cache.directory}.*look at the disk"):
        fetch.result(0.01)
    waits.set()
    fetch.result(10)


def held(monkeypatch):
    """Hold reads until the event is set."""
    waits, preadv = Event(), os.preadv
    monkeypatch.setattr(fetch_module, "SHORT_BYTES", 0)
    monkeypatch.setattr(
        "dataio.store.files.fetch.os.preadv", lambda *args: waits.wait(10) and preadv(*args)
    )
    return waits


def test_a_cancelled_fetch_has_no_rows(pool, monkeypatch):
    monkeypatch.setattr("dataio.store.files.fetch.NUM_THREADS", 1)
    fetcher, waits = Fetcher(reader_of(pool)), held(monkeypatch)
    fetches = [fetcher.fetch(locate(pool.cache.entries, np.arange(40))) for _ in range(3)]
    fetches[-1].cancel()
    waits.set()
    fetches[0].result(10)
    with pytest.raises(CancelledError):
        fetches[-1].result(10)
    fetcher.close()


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_corrupt_row_is_repaired_and_a_fetched_copy_of_it_not_used(
    tmp_path, beyond_memory, num_threads
):
    with open_pool(tmp_path, KINDS) as pool:
        good = gathered(pool, KINDS)
        at, rows = pool.cache.entries.position[:][7], pool.cache.read_rows(np.arange(40))
        wide = [c.name for c in pool.cache.schema.fixed].index("wide")
        pool.cache.files.fixed[wide].rows[at] ^= 1

        def repair(slots):
            assert slots.tolist() == [7]
            pool.cache.files.fixed[wide].rows[at] = rows.fixed[wide][7]

        with pytest.raises(CorruptRowError, match="slot 7"):
            gathered(pool, KINDS, num_threads=num_threads)
        assert_same(gathered(pool, KINDS, num_threads=num_threads, repair=repair), good)
        pool.cache.files.fixed[wide].rows[at] ^= 1
        skipped = gathered(pool, KINDS, num_threads=num_threads, on_error="skip")
        ids = [i for batch in skipped for i in batch["sample_id"].tolist()]
        assert sorted(ids) == [-1, *(set(range(40)) - {7})]


def test_rows_that_leave_are_fetched_too(pool, beyond_memory, monkeypatch):
    slots = np.array([3, 3, 39, 0])
    expected = pool.cache.read_rows(slots)
    gather = make_gather(pool, KINDS, num_threads=0)
    next(gather.batches(pick_in_turn(40), range(5), epoch=0))
    asked = counted(monkeypatch, Fetcher, "fetch")
    into = empty_rows(pool.cache.schema, expected.lengths)
    pool.cache.read_into(slots, into)
    gather.close()
    assert len(asked) == 1
    for name in ("sample_id", "checksum"):
        assert np.array_equal(getattr(into, name), getattr(expected, name))
    for column, other in zip(
        into.fixed + into.variable, expected.fixed + expected.variable, strict=True
    ):
        assert np.array_equal(column, other)


def test_no_descriptor_is_left_open(tmp_path, beyond_memory):
    def descriptors():
        links = Path("/proc/self/fd").iterdir()
        return [link for link in links if link.is_symlink() and link.resolve().parent == here]

    with open_pool(tmp_path, KINDS) as pool:
        here = pool.cache.directory.resolve()
        before = len(descriptors())
        gather = make_gather(pool, KINDS, num_threads=0)
        next(gather.batches(pick_in_turn(40), range(5), epoch=0))
        assert len(descriptors()) > before
        gather.close()
    assert not descriptors()


def test_rows_that_travel_are_fetched_though_no_batch_was_read(
    tmp_path, monkeypatch, beyond_memory
):
    with open_pool(tmp_path, KINDS, num_leaving=4) as pool:
        asked = counted(monkeypatch, Fetcher, "fetch")
        pool.make_room()  # as an exchange begins
        slots = np.arange(4)
        into = empty_rows(pool.cache.schema, pool.cache.lengths(slots))
        pool.cache.read_into(slots, into)
        assert len(asked) == 1
        assert into.sample_id.tolist() == pool.cache.entries.sample_id[slots].tolist()
