"""Readahead asks for the pages of the rows that come next, and for no others."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataio.batch.gather import Gather
from dataio.cache.files.readahead import PAGE_BYTES, Readahead, is_needed, merged
from dataio.cache.files.reader import RowReader
from dataio.rows.fields import Array
from tests.dataio.batch.gather_pool import FIELDS, gathered, open_pool, pick_in_turn
from tests.dataio.batch.test_gather import assert_same

EXTENTS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), max_size=30)


@given(EXTENTS)
def test_the_runs_of_pages_are_those_of_the_extents(extents):
    start = np.array([a for a, _ in extents], np.int64)
    stop = start + np.array([length for _, length in extents], np.int64)
    runs = merged(start, stop)
    pages = {
        page
        for a, b in zip(start.tolist(), stop.tolist(), strict=True)
        if b > a
        for page in range(a // PAGE_BYTES, -(-b // PAGE_BYTES))
    }
    assert {page for a, b in runs for page in range(a, b)} == pages
    assert all(b < c for (_, b), (c, _) in pairwise(runs))


def test_it_is_off_while_memory_holds_the_pool(tmp_path):
    with open_pool(tmp_path) as pool:
        reader = RowReader(pool.cache.schema, pool.cache.fixed, pool.cache.directory)
        assert not is_needed(reader)
        assert is_needed(reader, memory_bytes=1000)


def test_every_row_is_asked_for_before_it_is_read(tmp_path, monkeypatch):
    asked: list[tuple[Path, int, int]] = []
    monkeypatch.setattr("dataio.batch.gather.is_needed", lambda reader: True)
    monkeypatch.setattr("dataio.batch.lookup.ASKED_AHEAD", 2)
    advise, ask = os.posix_fadvise, Readahead.ask

    def ask_now(readahead, located):
        # What waits when the loader is closed is asked for no more.
        future = ask(readahead, located)
        future.result()
        return future

    monkeypatch.setattr(Readahead, "ask", ask_now)

    def note(descriptor, offset, length, advice):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        asked.append((path, offset, offset + length))
        advise(descriptor, offset, length, advice)

    monkeypatch.setattr("dataio.cache.files.readahead.os.posix_fadvise", note)
    fields = {**FIELDS, "wide": Array("wide", (3000,), "uint8")}
    with open_pool(tmp_path, fields) as pool:
        with monkeypatch.context() as plain:
            plain.setattr("dataio.batch.gather.is_needed", lambda reader: False)
            expected = gathered(pool, fields)
        assert not asked
        gather = Gather(pool.cache, fields, num_threads=1)
        batches = list(gather.batches(pick_in_turn(40), range(5), epoch=1))
        assert_same(batches, expected)
        gather.close()
        entries = pool.cache.entries
        wanted = [
            (pool.cache.directory / "heap-0.bin", a, a + n)
            for a, n in zip(entries.offset.tolist(), entries.extent_bytes.tolist(), strict=True)
        ]
        for file in pool.cache.fixed:
            width = file.column.width_bytes
            wanted += [
                (file.path, file.start_bytes + p * width, file.start_bytes + (p + 1) * width)
                for p in entries.position.tolist()
            ]
    for path, a, b in wanted:
        assert any(path == name and x <= a and b <= y for name, x, y in asked), (path, a, b)


def test_the_disk_is_asked_ahead_from_one_block_of_steps_to_the_next(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("dataio.batch.gather.is_needed", lambda reader: True)
    monkeypatch.setattr("dataio.batch.lookup.ASKED_AHEAD", 2)
    monkeypatch.setattr(Readahead, "ask", lambda readahead, located: asked.append(located))
    with open_pool(tmp_path) as pool:
        gather = Gather(pool.cache, FIELDS, num_threads=0)
        # The first block has four steps
        ahead = [
            len(asked) - done
            for done, _ in enumerate(gather.batches(pick_in_turn(40), range(5), epoch=1), 1)
        ]
        gather.close()
    assert ahead == [2, 2, 2, 1, 0]
