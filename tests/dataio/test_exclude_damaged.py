"""Excluded samples that the source does not give are no error; shown again, they are one."""

import pytest

import shuffle
from dataio import CacheError, CorruptRowError, SourceError
from dataio.store.tools.export import export_cache
from dataio.world import run_threads, thread_worlds
from tests.dataio.exclude_run import EPOCHS, make, trained, watch
from tests.dataio.source.formats.record_cases import MDS_FIELDS, copied


def zeroed(data: bytes) -> bytes:
    return data[:1800] + bytes(300) + data[2100:]


@pytest.mark.parametrize("damage", [zeroed, lambda data: data[:-9]], ids=["zeroed", "truncated"])
def test_a_damaged_shard_that_is_excluded_is_no_error(tmp_path, damage):
    source = copied("mds")(tmp_path / "mds")
    path = tmp_path / "mds" / "shard.00000.mds"
    path.write_bytes(damage(path.read_bytes()))

    def run(exclude):
        def on_rank(world):
            with make(
                world, tmp_path / "cache", source=source, fields=MDS_FIELDS, batch_size=2,
                shuffle=shuffle.Partial(0.5), exclude=exclude,
            ) as loader:  # fmt: skip
                return watch(loader)

        return run_threads(thread_worlds([2, 1], timeout_s=60), on_rank)

    with pytest.raises(SourceError, match=r"shard\.00000\.mds.* copy"):
        run(None)
    for _ in range(2):  # anew, and from what the caches hold
        everyone = run([str(path)])
        assert all(trained(everyone, epoch) == list(range(6, 12)) for epoch in range(EPOCHS))
    (node,) = (tmp_path / "cache").glob("*/node0")
    with pytest.raises(CacheError, match=r"does not match its checksum; run `tonari cache"):
        list(export_cache(node, tmp_path, file_format="arrow"))
    with pytest.raises((CorruptRowError, SourceError), match=r"shard\.00000\.mds.* copy"):
        run(None)
