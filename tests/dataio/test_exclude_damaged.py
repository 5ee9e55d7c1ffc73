"""Excluded samples that the source does not give are no error; shown again, they are one."""

import numpy as np
import pytest

import shuffle
from dataio import CacheError, CorruptRowError, NodeCache, Shards, SourceError
from dataio.store.tools.export import export_cache
from dataio.world import run_threads, single_world, thread_worlds
from tests.dataio.exclude_run import EPOCHS, make, trained, watch
from tests.dataio.source.formats.record_cases import MDS_FIELDS, copied


def zeroed(data: bytes) -> bytes:
    return data[:1800] + bytes(300) + data[2100:]


def truncated(data: bytes) -> bytes:
    return data[:-9]


@pytest.mark.parametrize("damage", [zeroed, truncated, None])
def test_a_damaged_or_missing_shard_that_is_excluded_is_no_error(tmp_path, damage):
    source = copied("mds")(tmp_path / "mds")
    path = tmp_path / "mds" / "shard.00000.mds"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))

    def run(exclude):
        def on_rank(world):
            with make(
                world, tmp_path / "cache", source=source, fields=MDS_FIELDS, batch_size=2,
                shuffle=shuffle.Partial(0.5), exclude=exclude,
            ) as loader:  # fmt: skip
                return watch(loader)

        return run_threads(thread_worlds([2, 1], timeout_s=60), on_rank)

    with pytest.raises(SourceError, match=r"(?=.*shard\.00000\.mds).*copy.* with exclude="):
        run(None)
    for _ in range(2):  # anew, and from what the caches hold
        everyone = run([str(path)])
        assert all(trained(everyone, epoch) == list(range(6, 12)) for epoch in range(EPOCHS))
    (node,) = (tmp_path / "cache").glob("*/node0")
    with pytest.raises(CacheError, match=r"does not match its checksum; run `tonari cache"):
        list(export_cache(node, tmp_path, file_format="arrow"))
    with pytest.raises((CorruptRowError, SourceError), match=r"(?=.*shard\.00000\.mds).*copy"):
        run(None)


def test_a_damaged_sample_is_padding_where_it_is_skipped(tmp_path):
    source = Shards(copied("mds")(tmp_path / "mds"), hashes=False)
    path = tmp_path / "mds" / "shard.00000.mds"
    data, num_samples = bytearray(path.read_bytes()), 6
    offsets = np.frombuffer(data, "<u4", num_samples + 1, 4)
    for sample in (1, 4):  # the size of its first value
        data[offsets[sample]] ^= 1
    path.write_bytes(data)

    def run(on_error, verify="once"):
        with make(
            single_world(), tmp_path, source=source, fields=MDS_FIELDS, batch_size=2,
            on_error=on_error, cache=NodeCache(tmp_path / verify, verify=verify),
        ) as loader:  # fmt: skip
            seen = watch(loader)
        return [trained([seen], epoch) for epoch in range(EPOCHS)]

    refused = r"sample 1: found .* with exclude= .* or with on_error=\"skip\""
    with pytest.raises(SourceError, match=refused):
        run("raise")
    whole = [sample for sample in range(12) if sample not in (1, 4)]
    assert run("skip") == [whole] * EPOCHS == run("skip"), "staged, and found in the cache"
    with pytest.raises(CorruptRowError, match=refused):
        run("raise")
    with pytest.raises(SourceError, match=refused):  # nobody would see that its row is none
        run("skip", verify="never")
