"""What is no growth: shards that change, vanish, sort between, or are still being written."""

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import webdataset as wds

from dataio import (
    Int,
    Loader,
    OtherDatasetError,
    QuotaError,
    Shards,
    SourceError,
    Staging,
    StateError,
)
from dataio.world import run_threads, single_world, thread_worlds
from importance import Weighted
from tests.dataio.growing.shards import FIELDS, Directory, make, samples_of, write_shard


def two_epochs(tmp_path, directory, spoil, *, replicas=(1, 1)):
    """Train an epoch, spoil the directory, and begin the next."""

    def run(world):
        with make(world, tmp_path / "cache", directory.path) as loader:
            seen = []
            for epoch in loader.epochs(2):
                for batch in loader:
                    seen.append((epoch, batch["sample_id"].tolist(), ""))
                if world.rank == 0 and not epoch:
                    spoil()
            return seen

    return run_threads(thread_worlds(list(replicas), timeout_s=20), run)


def test_a_shard_that_changed_is_named(tmp_path):
    """Whichever rank counted it."""
    for number in (0, 1):
        directory = Directory(tmp_path / f"{number}" / "shards")
        path = directory.path / f"shard-{number:03d}.tar"

        def spoil(directory=directory, path=path):
            directory.append(10)
            write_shard(path, 0, 12)

        with pytest.raises(SourceError, match=f"{path}: changed since .*only be appended"):
            two_epochs(tmp_path / f"{number}", directory, spoil)


def test_a_shard_that_vanished_is_named(tmp_path):
    directory = Directory(tmp_path / "shards")
    path = directory.path / "shard-001.tar"
    with pytest.raises(SourceError, match=f"{path}: is no longer there.*put it back"):
        two_epochs(tmp_path, directory, path.unlink)


def test_a_shard_that_sorts_between_is_named(tmp_path):
    directory = Directory(tmp_path / "shards")
    path = directory.path / "shard-000b.tar"
    with pytest.raises(SourceError, match=f"{path}: a new shard that comes before .*shard-001.tar"):
        two_epochs(tmp_path, directory, lambda: write_shard(path, 61, 10))


@pytest.mark.parametrize("cut", ["end", "member", "empty"])
def test_a_shard_that_is_being_written_is_not_taken_until_it_is_whole(tmp_path, caplog, cut):
    """Nor are those behind it. One that lacks only its end looks whole to who counts members."""
    directory = Directory(tmp_path / "shards")
    partial = tmp_path / "whole.tar"

    def spoil():
        write_shard(partial, 61, 10)
        data = partial.read_bytes()
        with tarfile.open(partial) as tar:
            end = tar.getmembers()[-1].offset_data + 512
        kept = {"end": end, "member": end - 600, "empty": 0}[cut]
        (directory.path / "shard-002.tar").write_bytes(data[:kept])
        write_shard(directory.path / "shard-003.tar", 71, 10)

    directory_path = directory.path
    with make(single_world(), tmp_path / "cache", directory_path) as loader:
        list(loader)
        spoil()
        list(loader)
        assert loader.num_samples == 61
        assert "shard-002.tar: is not taken into the next epoch" in caplog.text
        os.replace(partial, directory_path / "shard-002.tar")
        list(loader)
        assert loader.num_samples == 81
    # Nobody else begins with such a shard either.
    with tarfile.open(directory_path / "shard-003.tar") as tar:
        end = tar.getmembers()[-1].offset_data + 512
    os.truncate(directory_path / "shard-003.tar", end)
    with pytest.raises(SourceError, match=r"shard-003\.tar"):
        make(single_world(), tmp_path / "cache", directory_path)


def test_a_checkpoint_of_other_shards_is_refused(tmp_path):
    directory = Directory(tmp_path / "shards")
    with make(single_world(), tmp_path / "cache", directory.path) as loader:
        list(loader)
        loader.save(tmp_path / "save")
    write_shard(directory.path / "shard-001.tar", 30, 20)
    with make(single_world(), tmp_path / "new", directory.path) as loader:
        with pytest.raises(StateError, match=r"first shards hold 30, 50 samples.*put back"):
            loader.restore(tmp_path / "save")
    write_shard(directory.path / "shard-000.tar", 0, 31)
    write_shard(directory.path / "shard-001.tar", 31, 30)
    with make(single_world(), tmp_path / "other", directory.path) as loader:
        with pytest.raises(StateError, match="shards is"):
            loader.restore(tmp_path / "save")


def test_a_cache_of_shards_that_changed_is_refused(tmp_path):
    directory = Directory(tmp_path / "shards")
    with make(single_world(), tmp_path / "cache", directory.path) as loader:
        list(loader)
    write_shard(directory.path / "shard-001.tar", 30, 20)
    with pytest.raises(OtherDatasetError, match=r"then start it again; .*remove the directory"):
        make(single_world(), tmp_path / "cache", directory.path)


def test_a_node_without_room_for_new_rows_says_so_and_lets_go_of_its_cache(tmp_path):
    directory = Directory(tmp_path / "shards")
    with make(single_world(), tmp_path / "cache", directory.path, quota="140kB") as loader:
        list(loader)
        write_shard(directory.path / "shard-002.tar", 61, 20_000)
        with pytest.raises(QuotaError, match="quota"):
            list(loader)
    with make(single_world(), tmp_path / "cache", directory.path) as loader:
        assert loader.num_samples == 20_061


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"importance": Weighted(np.ones(61))}, "one weight a sample.*name a field"),
        ({"staging": Staging(transform=dict)}, "give it as transform="),
    ],
)
def test_what_cannot_go_on_with_more_samples_is_refused(tmp_path, options, match):
    directory = Directory(tmp_path / "shards")
    source = Shards(str(directory.path / "*.tar"), grows=True)
    with pytest.raises(ValueError, match=match):
        Loader(
            source, world=single_world(), cache=tmp_path / "cache", batch_size=5, fields=FIELDS,
            **options,
        )  # fmt: skip


def test_what_has_an_index_of_all_shards_is_refused(tmp_path):
    (tmp_path / "folder" / "cat").mkdir(parents=True)
    (tmp_path / "folder" / "cat" / "1.jpg").write_bytes(b"jpeg")
    with pytest.raises(SourceError, match="a folder of images"):
        Loader(
            Shards(tmp_path / "folder", grows=True), world=single_world(),
            cache=tmp_path / "cache", batch_size=1, fields=FIELDS,
        )  # fmt: skip
    directory = Directory(tmp_path / "shards")
    with pytest.raises(ValueError, match="pipeline"):
        Shards(
            wds.WebDataset(str(directory.path / "shard-000.tar"), shardshuffle=False), grows=True
        )


def test_nothing_is_lost_by_a_warning_alone(tmp_path):
    """An epoch without new shards is as it was."""
    directory = Directory(tmp_path / "shards")
    results = two_epochs(tmp_path, directory, lambda: None)
    assert samples_of(results, 1) == list(range(61))


WRITERS: dict[str, Callable[[pa.Table, Path], object]] = {
    "parquet": lambda table, path: pq.write_table(table, path),
    "arrow": lambda table, path: feather.write_feather(table, path, compression="uncompressed"),
    "jsonl": lambda table, path: path.write_text(
        "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    ),
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_other_formats_grow_too(tmp_path, suffix):
    """Of those with an end of their own, a shard without it is not taken."""

    def write(number, first, count):
        path = tmp_path / f"shard-{number}.{suffix}"
        WRITERS[suffix](pa.table({"cls": list(range(first, first + count))}), path)
        return path

    write(0, 0, 20)
    with Loader(
        Shards(tmp_path / f"*.{suffix}", grows=True), world=single_world(), batch_size=5,
        cache=tmp_path / "cache", fields={"label": Int("cls")},
    ) as loader:  # fmt: skip
        lengths = []
        for number in (1, 2):
            found = [i for batch in loader for i in batch["label"].tolist()]
            assert sorted(found) == list(range(len(found)))
            lengths.append(len(found))
            whole = write(number, 20 * number, 20)
        if suffix != "jsonl":
            whole.write_bytes(whole.read_bytes()[:-30])
            list(loader)
            assert loader.num_samples == 40
            write(2, 40, 20)
        list(loader)
        assert lengths == [20, 40]
        assert loader.num_samples == 60
