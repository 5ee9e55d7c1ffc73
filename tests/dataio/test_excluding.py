"""What is told of samples to exclude is found in the source, or refused with the cure."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataio import DataioError, Int, NumpySource, WorldError
from dataio.world import run_threads, single_world, thread_worlds
from tests.dataio.exclude_run import NUM_SAMPLES, make


def exclusion_of(tmp_path, given, source=None):
    with make(
        single_world(), tmp_path / "cache", exclude=given, source=source, **fields_of(source)
    ) as loader:
        every = np.arange(loader.num_samples)
        return every[loader._session.exclusion.flags(every)].tolist()


def fields_of(source):
    return {"fields": {"label": Int("label")}} if source is not None else {}


def test_ids_come_as_lists_arrays_bools_and_files(tmp_path):
    wanted = [3, 50, 101]
    flags = np.zeros(NUM_SAMPLES, np.bool_)
    flags[wanted] = True
    (tmp_path / "list.csv").write_text("sample_id,key\n50,\n3,\n101,\n3,\n")
    pq.write_table(pa.table({"label": [1, 2, 3], "sample_id": wanted}), tmp_path / "list.parquet")
    for given_ in (
        [101, 3, 50, 3], np.array(wanted, np.uint8), flags, tmp_path / "list.csv",
        str(tmp_path / "list.parquet"), tuple(wanted),
    ):  # fmt: skip
        assert exclusion_of(tmp_path, given_) == wanted
    assert exclusion_of(tmp_path, []) == []
    (tmp_path / "empty.csv").write_text("sample_id,key\n")
    assert exclusion_of(tmp_path, tmp_path / "empty.csv") == []


@pytest.fixture
def shards(tmp_path) -> list[str]:
    """Two shards of five samples with keys."""
    for shard in range(2):
        keys = [f"s{shard}/{i}" for i in range(5)]
        pq.write_table(
            pa.table({"key": keys, "label": list(range(5))}), tmp_path / f"{shard}.parquet"
        )
    return [str(tmp_path / f"{shard}.parquet") for shard in range(2)]


def test_keys_and_shards_are_found_in_the_source(tmp_path, shards):
    assert exclusion_of(tmp_path, ["s1/2", "s0/4"], shards) == [4, 7]
    assert exclusion_of(tmp_path, [shards[1], "s0/0"], shards) == [0, 5, 6, 7, 8, 9]
    assert exclusion_of(tmp_path, shards[0], shards) == [0, 1, 2, 3, 4]
    (tmp_path / "keys.csv").write_text("key\ns1/0\n")
    assert exclusion_of(tmp_path, tmp_path / "keys.csv", shards) == [5]
    (tmp_path / "both.csv").write_text('sample_id,key\n7,"s1/2"\n')
    assert exclusion_of(tmp_path, tmp_path / "both.csv", shards) == [7]
    both = [tmp_path / "both.csv", tmp_path / "keys.csv"]
    assert exclusion_of(tmp_path, both, shards) == [5, 7]
    assert exclusion_of(tmp_path, [*map(str, both), "s0/1", shards[0]], shards) == [
        0, 1, 2, 3, 4, 5, 7
    ]  # fmt: skip


def test_what_is_not_of_the_source_is_refused_with_the_cure(tmp_path, shards):
    def refused(given_, source=None):
        with pytest.raises((ValueError, DataioError)) as refusal:
            exclusion_of(tmp_path, given_, source)
        return str(refusal.value)

    made_of = "give a list that was made of this source"
    told = refused([5, 103, -1])
    assert "exclude: found sample_id 103 (and 1 more like it)" in told
    assert "expected ids in [0, 103)" in told
    assert made_of in told
    assert "all 103 samples of memory are left out" in refused(range(103))
    assert "float64 values such as 1.5, expected whole numbers" in refused(np.array([1.5]))
    with pytest.raises(TypeError, match=r"exclude is \[1.5\].*give sample ids, keys, or the path"):
        exclusion_of(tmp_path, [1.5])
    assert "7 bools, expected one for each of the 103" in refused(np.ones(7, np.bool_))
    assert "shape [2, 2], expected one dimension" in refused(np.zeros((2, 2), np.int64))
    assert "none.csv cannot be read" in refused(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("id,name\n1,a\n")
    assert "has the columns id, name, expected sample_id, " in refused(tmp_path / "other.csv")
    for encoding in ("utf-16", "latin-1"):
        (tmp_path / "codes.csv").write_bytes("key\ns\u00e90\n".encode(encoding))
        assert "codes.csv cannot be read" in (said := refused(tmp_path / "codes.csv", shards))
        assert "expected a CSV file in UTF-8" in said
    for columns in ("sample_id,sample_id", "key,key", "sample_id,key,sample_id"):
        (tmp_path / "twice.csv").write_text(f"{columns}\n{columns.count(',') * '1,'}1\n")
        assert "twice.csv has 2 columns" in refused(tmp_path / "twice.csv")
    table = pa.table([[1], [2]], ["sample_id", "sample_id"])
    pq.write_table(table, tmp_path / "twice.parquet")
    assert "twice.parquet has 2 columns sample_id" in refused(tmp_path / "twice.parquet")
    (tmp_path / "text.csv").write_text("sample_id\nabc\n")
    assert "text.csv cannot be read" in refused(tmp_path / "text.csv")
    pq.write_table(pa.table({"sample_id": [0.5]}), tmp_path / "half.parquet")
    assert "sample_id is double, expected whole numbers" in refused(tmp_path / "half.parquet")
    pq.write_table(pa.table({"sample_id": [1, None]}), tmp_path / "null.parquet")
    assert "1 rows without a sample_id" in refused(tmp_path / "null.parquet")
    told = refused(["s0/1", "nowhere"], shards)
    assert "1 of 2 keys are of no sample" in told
    assert "'nowhere'" in told
    assert made_of in told
    (tmp_path / "stale.csv").write_text("sample_id,key\n7,s0/0\n")
    told = refused(tmp_path / "stale.csv", shards)
    assert "says that sample 7 is 's0/0', and the source has 's1/2' there" in told
    pq.write_table(pa.table({"key": ["s0/1"] * 5, "label": [0] * 5}), shards[1])
    told = refused(["s0/1"], shards)
    assert "'s0/1' is that of the samples 1 and 5" in told
    arrays = NumpySource({"label": np.arange(10)})
    assert "has no keys, found 'a' to leave out" in refused(["a"], arrays)


@pytest.mark.parametrize("mask", [[0, 1], [1, 1], [0, 255], [0, 0]])
def test_a_mask_of_whole_numbers_is_not_taken_for_ids(tmp_path, mask):
    for given_ in (np.resize(mask, 103), np.resize(mask, 103).astype(np.uint8), mask * 3):
        with pytest.raises(ValueError, match=r"which may be a mask or ids.*mask\.astype\(bool\)"):
            exclusion_of(tmp_path, given_)
    assert exclusion_of(tmp_path, np.resize([0, 1], 103).astype(bool)) == list(range(1, 103, 2))
    assert exclusion_of(tmp_path, [0, 1]) == [0, 1]


def test_ranks_that_are_given_other_lists_are_named(tmp_path):
    def on_rank(world):
        make(world, tmp_path, exclude=[world.rank])

    with pytest.raises(WorldError, match="rank 1 was made with exclude 1 samples"):
        run_threads(thread_worlds([1, 1], timeout_s=20), on_rank)
