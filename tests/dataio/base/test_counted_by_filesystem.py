"""What a loader says it read is what the filesystem says was read of it."""

import os
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

from dataio import Bytes, Int, Loader, NodeCache, Reports, Workers
from dataio.rows.fields import Field
from dataio.source import Storage, open_source
from tests.dataio.source.shards import numbered, write_tar
from tests.slowfs import SlowDirectory, slowfs, what_is_missing
from tonari.bench.storage.site.counters import Counters
from tonari.bench.storage.site.site import describe_site

pytestmark = pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())
FIELDS: dict[str, Field] = {"data": Bytes("bin"), "label": Int("cls")}
SAMPLES, SAMPLE_BYTES = 240, 20_000
EPOCHS = 2
MOVED = ("open", "read", "read_bytes")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    directory = tmp_path / "shards"
    directory.mkdir()
    for number in range(3):
        first = number * SAMPLES // 3
        members = numbered(SAMPLES // 3, num_bytes=SAMPLE_BYTES, first=first)
        write_tar(directory / f"{number}.tar", members)
    return directory


def since(slow: SlowDirectory, before: dict[str, int]) -> dict[str, int]:
    return {kind: count - before[kind] for kind, count in slow.counts().items()}


@pytest.mark.parametrize("quota", [None, "4MB"])
def test_the_loader_reads_what_it_says_and_after_staging_only_what_did_not_fit(
    shards: Path, tmp_path: Path, quota: str | None
) -> None:
    with slowfs(shards, cache="direct_io") as slow:
        before = slow.counts()
        storage = Storage()
        with Loader(
            open_source(str(slow.path), storage=storage), batch_size=16, fields=FIELDS,
            cache=NodeCache(tmp_path / "cache", quota=quota), workers=Workers(threads=1),
            reports=Reports(progress=False),
        ) as loader:  # fmt: skip
            staged = since(slow, before)
            assert staged["read_bytes"] == loader.stats()["source_bytes"]
            assert staged["open"] == storage.num_opens
            assert staged["read_bytes"] > 0
            before_epochs = slow.counts()
            seen = [
                i for _ in loader.epochs(EPOCHS) for b in loader for i in b["sample_id"].tolist()
            ]
            trained = since(slow, before_epochs)
            stats = loader.stats()
        assert sorted(i for i in seen if i >= 0) == sorted([*range(SAMPLES)] * EPOCHS)
        assert since(slow, before)["read_bytes"] == stats["source_bytes"]
        assert since(slow, before)["open"] == storage.num_opens
    if quota is None:
        assert {kind: trained[kind] for kind in MOVED} == dict.fromkeys(MOVED, 0)
    else:
        assert stats["streamed_rows"] > 0
        assert trained["read_bytes"] >= stats["streamed_rows"] * SAMPLE_BYTES * 0.99


class Files(Dataset[bytes]):
    """A file for each sample, as the usual dataset of a `DataLoader` has them."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, sample: int) -> bytes:
        descriptor = os.open(self.paths[sample], os.O_RDONLY)
        try:
            return os.read(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)


@pytest.mark.parametrize(
    ("cache", "reads_of_epoch"), [("direct_io", [1, 1]), ("auto_cache", [1, 0])]
)
def test_a_dataloader_opens_each_file_in_each_epoch_and_reads_it_unless_it_is_kept(
    tmp_path: Path, cache, reads_of_epoch: list[int]
) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    for number in range(SAMPLES):
        (directory / str(number)).write_bytes(os.urandom(SAMPLE_BYTES))
    with slowfs(directory, cache=cache) as slow:
        files = Files([slow.path / str(number) for number in range(SAMPLES)])
        site = describe_site(slow.path)
        batches = DataLoader(files, batch_size=16, shuffle=True, collate_fn=list)
        for reads in reads_of_epoch:
            before, counted = slow.counts(), Counters.read(site)
            num_bytes = sum(len(sample) for batch in batches for sample in batch)
            asked = Counters.read(site).since(counted).asked_read_bytes
            found = since(slow, before)
            assert num_bytes == SAMPLES * SAMPLE_BYTES
            assert found["open"] == SAMPLES
            assert found["read_bytes"] == reads * num_bytes
            # This process's own reads, wherever they were answered from
            assert asked == pytest.approx(num_bytes, rel=0.01)
