"""What a cache costs: on the disk, to open, and from one epoch to the next."""

import contextlib
import json
import threading
import time

import numpy as np
import pytest

from dataio import CacheError
from dataio.plan.layout import Layout
from dataio.plan.placement import Placement
from dataio.plan.policies import ExchangeContext
from dataio.rows.fields import Array, Bytes, Int, row_schema
from dataio.rows.rows import Rows
from dataio.store.epoch_end import commit_arrivals
from dataio.store.files.extents import find_free_extents, find_free_positions
from dataio.store.files.manifest import make_entries
from dataio.world import run_threads, single_world, thread_worlds
from shuffle import Partial
from tests.memory_source import FIELDS, MemorySource, placement_of
from tests.opened import make_pool

KIB = {
    "fixed": {"label": Int("cls"), "data": Array("npy", (1024,), "uint8")},
    "variable": {"label": Int("cls"), "data": Bytes("bin")},
}


class KibSource(MemorySource):
    """Samples of 1 KiB and a label; those of variable size differ by a few bytes."""

    def read(self, sample_ids, fields):
        schema = row_schema(fields)
        for ids in np.array_split(sample_ids, max(len(sample_ids) // 4096, 1)):
            num_rows = len(ids)
            lengths = np.empty((num_rows, 0), np.int64)
            fixed = [np.ascontiguousarray(ids).view(np.uint8).reshape(num_rows, 8)]
            variable = []
            if schema.variable:
                lengths = 1024 + (ids % 9 - 4).reshape(num_rows, 1)
                variable = [np.zeros(int(lengths.sum()), np.uint8)]
            else:
                fixed.append(np.zeros((num_rows, 1024), np.uint8))
            sums = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            yield Rows(schema, ids, sums, tuple(fixed), lengths, tuple(variable))


def pool_of(source, fields, root, *, world=None, num_leaving=0, columns=("loss",)):
    world = world or single_world()
    layout = Layout(world.replicas_per_node, source.num_samples)
    return make_pool(
        source, fields, world=world, root=root, num_slots=layout.pool_rows(world.node),
        num_leaving=num_leaving, columns=columns,
    )  # fmt: skip


def disk_bytes(directory):
    return sum(512 * p.stat().st_blocks for p in directory.iterdir() if p.name != "scores.npy")


@pytest.mark.parametrize("kind", KIB)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_staged_cache_of_small_samples_takes_5_percent_more_than_its_rows(tmp_path, kind, ranks):
    num_rows = 30_000

    def run(world):
        pool = pool_of(KibSource(num_rows), KIB[kind], tmp_path, world=world, num_leaving=3000)
        with contextlib.closing(pool):
            pool.ensure(Placement("all", 0, num_rows, lambda: np.arange(num_rows)))
            entries, schema = pool.cache.entries, pool.cache.schema
            payload = entries.extents_total_bytes + num_rows * schema.fixed_bytes
            return pool.cache.directory, payload, pool.cache.log.tables.bytes_written

    results = run_threads(thread_worlds([ranks]), run)
    directory, payload, _ = results[0]
    assert payload <= disk_bytes(directory) <= 1.05 * payload
    assert payload <= sum(written for _, _, written in results) <= 1.07 * payload


def test_what_is_free_is_known_without_looking_at_all_rows_again(tmp_path):
    """Kept up to date epoch by epoch, it is what the manifests in use say, on every rank."""
    policy, num_samples = Partial(0.4), 90

    def run(world):
        layout = Layout(world.replicas_per_node, num_samples)
        leaving = policy.num_leaving(layout)
        source = MemorySource(num_samples)
        pool = pool_of(source, FIELDS, tmp_path, world=world, num_leaving=leaving)
        pool.ensure(placement_of(policy, layout, node=world.node, epoch=0, seed=0))
        cache, found = pool.cache, []
        for epoch in range(6):
            running = policy.begin(ExchangeContext(world, cache, layout, epoch, 0, range(1), 20, 0))
            assert running is not None
            running.progress(0)
            running.finish(pool.scores)
            if epoch == 3:
                cache.forget_arrivals()
                break
            commit_arrivals(pool, epoch + 1)
        used = [cache.entries, cache.log.before()]
        expected = find_free_positions(len(cache.files.headers.rows), [e.position for e in used])
        found.append(np.array_equal(cache.log.space.positions, expected))
        mine = [cache.entries.take(slice(None)), cache.log.undo]
        fresh = find_free_extents(mine, heap=cache.local_rank)
        found.append(cache.log.space.extents._gaps == fresh._gaps)
        found.append(cache.log.space.extents.end == fresh.end)
        pool.close()
        return found

    assert run_threads(thread_worlds([2, 1]), run) == [[True, True, True]] * 3


def test_arrivals_are_flushed_after_their_last_write_before_they_are_sealed(tmp_path):
    """However many flushes were asked for; those that nothing was written for are left out."""
    policy, held = Partial(0.4), threading.Event()
    seen: dict[int, list[str]] = {0: [], 1: []}

    def run(world):
        layout = Layout(world.replicas_per_node, 80)
        pool = pool_of(
            MemorySource(80), FIELDS, tmp_path, world=world, num_leaving=policy.num_leaving(layout)
        )
        pool.ensure(placement_of(policy, layout, node=world.node, epoch=0, seed=0))
        cache, events = pool.cache, seen[world.rank]

        def watched(name, then):
            def call(*args, **keywords):
                events.append(name)
                if name == "flush":
                    # It lasts until all is written: those asked for meanwhile wait behind it.
                    held.wait(10)
                return then(*args, **keywords)

            return call

        for name, part, method in (
            ("write", cache.writer, "write"),
            ("flush", cache.files, "sync"),
            ("seal", cache.log.tables, "write_table"),
        ):
            setattr(part, method, watched(name, getattr(part, method)))
        running = policy.begin(ExchangeContext(world, cache, layout, 0, 0, range(1), 20, 0))
        assert running is not None
        running.progress(0)
        running.finish(pool.scores)
        world.barrier(doing="write all")
        held.set()
        commit_arrivals(pool, 1)
        pool.close()

    run_threads(thread_worlds([1, 1]), run)
    for events in seen.values():
        assert events.count("write") > 3
        assert events.count("flush") <= 2, "one for the first rows, one for all that came meanwhile"
        before = events[: events.index("seal")]
        last_write = len(before) - before[::-1].index("write")
        assert "flush" in before[last_write:], events


def test_a_cache_of_the_format_before_says_so(tmp_path):
    pool_of(MemorySource(20), FIELDS, tmp_path).close()
    (meta,) = tmp_path.glob("*/node0/meta.json")
    older = json.loads(meta.read_text()) | {"format": 2}
    del older["checksum"]
    meta.write_text(json.dumps(older))
    with pytest.raises(CacheError, match=r"cache format 2, this version reads 3; remove"):
        pool_of(MemorySource(20), FIELDS, tmp_path)


def test_an_unfinished_staging_of_a_dataset_that_changed_is_begun_anew(tmp_path):
    pool = pool_of(MemorySource(40), FIELDS, tmp_path)
    schema_rows = next(MemorySource(40).read(np.arange(10), FIELDS))
    pool.cache.staged.write(np.arange(10), pool.cache.log.space.set_aside(10), schema_rows)
    pool.cache.seal_staged()
    pool.close()
    changed = MemorySource(40)
    changed.fingerprint = "another"
    with contextlib.closing(pool_of(changed, FIELDS, tmp_path)) as pool:
        assert pool.holds_nothing()
        pool.ensure(Placement("all", 0, 40, lambda: np.arange(40)))
    assert sorted(changed.rows_read) == list(range(40))


@pytest.mark.slow
@pytest.mark.parametrize("state", ["staged", "exchanged"])
def test_an_index_of_100_million_rows_opens_in_under_2_seconds(tmp_path, state):
    """With the checksum of its base, which lies in memory: as staged, and as exchanges leave it."""
    num_rows = 100_000_000
    fields = KIB["variable"] if state == "exchanged" else {"label": Int("cls")}
    source = MemorySource(num_rows)
    pool = pool_of(source, fields, tmp_path, columns=())
    slots = np.arange(num_rows)
    places, lengths = slots, np.empty((num_rows, 0), np.int64)
    if state == "exchanged":
        # Multiples of a number that has no divisor in common with all: each place once.
        places = slots * 48_271 % num_rows
        lengths = (1024 + slots % 9)[:, None]
    entries = make_entries(
        slot=slots, sample_id=places, checksum=(slots * 2654435761).astype(np.uint64),
        position=places, heap=np.zeros_like(slots), offset=places * 1033 * (state == "exchanged"),
        lengths=lengths,
    )  # fmt: skip
    pool.cache.rewrite(entries, epoch=0, placement="all")
    base = max(pool.cache.directory.glob("base-*.arrow"))
    pool.close()
    del entries, slots, places, lengths
    started = time.perf_counter()
    pool = pool_of(source, fields, tmp_path, columns=())
    pool.ensure(Placement("all", 0, num_rows, lambda: np.empty(0, np.int64)))
    last = pool.cache.entries.sample_id[np.array([num_rows - 1])].tolist()
    took_s = time.perf_counter() - started
    print(f"{state}: a base of {base.stat().st_size / 1e9:.2f} GB opened in {took_s:.2f} s")
    assert last == [48_271 * (num_rows - 1) % num_rows if state == "exchanged" else num_rows - 1]
    assert took_s < 2
    pool.close()
