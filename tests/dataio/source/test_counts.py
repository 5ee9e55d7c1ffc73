"""The counts of shards stay on the node: a warm start opens no shard, a wrong one is found out."""

import os
from pathlib import Path

import numpy as np
import pytest

from dataio.source import Source, open_source
from dataio.source.base import ShardedSource
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.source.shards import numbered, write_tar
from tests.dataio.source.test_open import shards


def opened(shard_directory: Path, index_cache: Path, world: World | None = None) -> ShardedSource:
    source = open_source(str(shard_directory), index_cache=index_cache, world=world)
    assert isinstance(source, ShardedSource)
    return source


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    directory = tmp_path / "shards"
    directory.mkdir()
    shards(directory)
    return directory, tmp_path / "cache" / "indexes"


def test_a_warm_start_opens_no_shard(places: tuple[Path, Path]) -> None:
    cold = opened(*places)
    assert cold.storage.num_opens == 5
    warm = opened(*places)
    assert (warm.storage.num_opens, warm.bytes_read) == (0, 0)
    assert warm.shards == cold.shards
    assert warm.fingerprint == cold.fingerprint
    assert len(list(places[1].iterdir())) == 1


def test_only_what_changed_is_counted_again(places: tuple[Path, Path]) -> None:
    opened(*places)
    write_tar(places[0] / "2.tar", numbered(30, num_bytes=8))
    os.utime(places[0] / "3.tar", ns=(1, 1))
    again = opened(*places)
    assert again.storage.num_opens == 2
    assert [shard.num_samples for shard in again.shards] == [3, 4, 30, 6, 7]
    assert opened(*places).storage.num_opens == 0


def test_a_damaged_file_of_counts_is_made_anew(places: tuple[Path, Path]) -> None:
    cold = opened(*places)
    file = next(places[1].iterdir())
    whole = file.read_bytes()
    for damaged in (b"", whole[:-5], whole.replace(b"[[7], ", b"[[8], "), b"\xff" * 40):
        assert damaged != whole
        file.write_bytes(damaged)
        again = opened(*places)
        assert again.storage.num_opens == 5
        assert again.shards == cold.shards
        assert file.read_bytes() == whole


def test_counts_that_cannot_be_kept_cost_only_the_next_start(
    places: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    places[1].parent.write_text("a file where the directory should be")
    assert opened(*places).num_samples == 25
    assert "could not be kept" in caplog.text


def test_every_rank_starts_warm_whatever_their_number(places: tuple[Path, Path]) -> None:
    def work(world: World) -> Source:
        return opened(*places, world)

    run_threads(thread_worlds([2, 1]), work)
    for layout in ([1], [4], [1, 2]):
        assert {source.bytes_read for source in run_threads(thread_worlds(layout), work)} == {0}


def test_other_shards_have_other_counts(places: tuple[Path, Path]) -> None:
    opened(*places)
    some = open_source([str(places[0] / "1.tar"), str(places[0] / "0.tar")], index_cache=places[1])
    assert some.num_samples == 7
    assert np.isclose(len(list(places[1].iterdir())), 2)
