"""The table of formats and damages, for files of records, columns and arrays."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataio.base.errors import DataioError
from dataio.rows.fields import Array, Bytes, Field, Int, Text, Tokens
from dataio.source import open_source
from dataio.source.wrap.packed import Sequences
from tests.dataio.source.damages import DAMAGES, REPEATS, Format, flip, judge, samples_of
from tests.dataio.source.formats.record_cases import framed, packed, write_megatron, zstd
from tests.dataio.source.shards import Row, read_all

NUM_SAMPLES = 60
Pack = Callable[[bytes], bytes]


def text(number: int) -> str:
    """Of different lengths, that do not compress well."""
    return np.random.default_rng(number).bytes(40 + number).hex()


def twice(pack: Pack) -> Pack:
    """Compressed in two parts, as ``cat`` joins them."""
    return lambda data: pack(data[:3000]) + pack(data[3000:])


def lines(directory: Path, *, pack: Pack = bytes, suffix: str = "") -> Path:
    path = directory / f"shard.jsonl{suffix}"
    documents = [{"x": number, "s": text(number)} for number in range(NUM_SAMPLES)]
    path.write_bytes(pack("".join(f"{json.dumps(each)}\n" for each in documents).encode()))
    return path


def records(directory: Path, *, pack: Pack = bytes, suffix: str = ".tfrecord") -> Path:
    path = directory / f"shard{suffix}"
    path.write_bytes(pack(b"".join(framed(text(i).encode()) for i in range(NUM_SAMPLES))))
    return path


def mds(
    directory: Path, *, pack: Pack = bytes, suffix: str = "", indexed: bool = True, first: int = 0
) -> Path:
    path = directory / f"shard.00000.mds{suffix}"
    columns = {
        "column_names": ["x", "s"], "column_encodings": ["int", "str"], "column_sizes": [8, None],
        "version": 2,
    }  # fmt: skip
    samples = [
        len(text(i)).to_bytes(4, "little") + i.to_bytes(8, "little") + text(i).encode()
        for i in range(first, first + NUM_SAMPLES)
    ]
    raw = packed(samples, json.dumps(columns).encode())
    path.write_bytes(pack(raw))
    parts = {
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(raw), "hashes": {}},
        "zip_data": {"basename": path.name, "bytes": path.stat().st_size, "hashes": {}},
    }
    entry = {"format": "mds", "version": 2, "samples": NUM_SAMPLES, **parts}
    if indexed:
        (directory / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))
    return path


def litdata(directory: Path, *, pack: Pack = bytes, suffix: str = "", first: int = 0) -> Path:
    path = directory / f"chunk-0-0{suffix}.bin"
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    config = {"data_format": ["str"], "data_spec": json.dumps([1, leaf]), "compression": None}
    samples = [text(i).encode() for i in range(first, first + NUM_SAMPLES)]
    raw = packed([len(each).to_bytes(4, "little") + each for each in samples])
    path.write_bytes(pack(raw))
    chunk = {"filename": path.name, "chunk_size": NUM_SAMPLES, "chunk_bytes": len(raw)}
    (directory / "index.json").write_text(json.dumps({"chunks": [chunk], "config": config}))
    return path


def megatron(directory: Path, *, suffix: str, first: int = 0) -> Path:
    sequences = [np.arange(first + i, dtype="<u2") % 50_000 for i in range(1, NUM_SAMPLES + 1)]
    name = write_megatron(directory / "shard", sequences, [*range(NUM_SAMPLES + 1)])
    return Path(name + suffix)


def table() -> pa.Table:
    numbers = range(NUM_SAMPLES)
    return pa.table({
        "x": list(numbers), "s": [text(i) for i in numbers],
        "d": pa.array([f"kind {i % 3}" for i in numbers]).dictionary_encode(),
    })  # fmt: skip


def arrow(directory: Path, *, suffix: str, codec: str | None = None) -> Path:
    path = directory / f"shard{suffix}"
    new = pa.ipc.new_stream if suffix == ".arrow" else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with new(path, table().schema, options=options) as writer:
        writer.write_table(table(), 20)
    return path


def parquet(directory: Path, **options: Any) -> Path:
    path = directory / "shard.parquet"
    pq.write_table(table(), path, row_group_size=20, **options)
    return path


X = np.arange(6 * NUM_SAMPLES, dtype=np.int32).reshape(NUM_SAMPLES, 6)


def npy(directory: Path) -> Path:
    np.save(directory / "shard.npy", X)
    return directory / "shard.npy"


def npz(directory: Path, *, save: Callable[..., None] = np.savez) -> Path:
    save(directory / "shard.npz", x=X, y=np.arange(NUM_SAMPLES))
    return directory / "shard.npz"


def hdf5(directory: Path) -> Path:
    with h5py.File(directory / "shard.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(20, 6), fletcher32=True)
        file.create_dataset("y", data=np.arange(NUM_SAMPLES), chunks=(20,), fletcher32=True)
    return directory / "shard.h5"


def netcdf3(directory: Path) -> Path:
    with netCDF4.Dataset(directory / "shard.nc", "w", format="NETCDF3_CLASSIC") as file:
        file.createDimension("t", None)
        file.createDimension("c", 6)
        file.createVariable("x", "i4", ("t", "c"))[:] = X
        file.createVariable("y", "i4", ("t",))[:] = np.arange(NUM_SAMPLES)
    return directory / "shard.nc"


LINES: Mapping[str, Field] = {"x": Int("x"), "s": Text("s")}
RECORD: Mapping[str, Field] = {"r": Bytes("__record__")}
COLUMNS: Mapping[str, Field] = {"x": Int("x"), "s": Text("s"), "d": Text("d")}
DOCUMENTS: Mapping[str, Field] = {"t": Tokens("tokens"), "d": Int("document")}
ARRAYS: Mapping[str, Field] = {"x": Array("x", (6,), "int32"), "y": Int("y")}


IN_MIDDLE, AT_END = "zeros in its middle", "zeros over its last third"
LEAF: Mapping[str, Field] = {"s": Text("0")}


def stale(write: Callable[..., Path]) -> Callable[[Path], Path]:
    """Write a shard beside the index of another of other lengths."""

    def write_both(directory: Path) -> Path:
        path = write(directory, first=1)
        indexes = {each: each.read_bytes() for each in directory.iterdir() if is_index(each)}
        write(directory)
        for index, data in indexes.items():
            index.write_bytes(data)
        return path

    return write_both


def is_index(path: Path) -> bool:
    return path.suffix in (".idx", ".json")


def without_suffix(path: Path) -> str:
    return str(path.with_suffix(""))


def parent(path: Path) -> str:
    return str(path.parent)


def every(step: int, *, stop: int | None = None, first: int = 0) -> Any:
    """Offsets at which all is covered: by checksums, or as what lies there is a number of bytes."""
    return lambda data: range(first, len(data) if stop is None else stop, step)


def nowhere(data: bytes) -> Iterable[int]:
    return ()


TABLE_BYTES = 4 * (NUM_SAMPLES + 2)
"""Of MDS and LitData, where a flipped bit is another length."""
FORMATS = [
    Format("jsonl", lines, LINES, nowhere),
    Format("jsonl.gz", partial(lines, pack=twice(gzip.compress), suffix=".gz"), LINES, every(997)),
    Format("jsonl.zst", partial(lines, pack=twice(zstd), suffix=".zst"), LINES, nowhere),
    Format("jsonl, gzipped", partial(lines, pack=gzip.compress), LINES, every(997, first=12)),
    Format("jsonl.gz, plain", partial(lines, suffix=".gz"), LINES, nowhere),
    Format("tfrecord", records, RECORD, every(997)),
    Format("tfrec", partial(records, suffix=".tfrec"), RECORD, every(1997)),
    Format("tfrecord.gz", partial(records, pack=gzip.compress, suffix=".tfrecord.gz"), RECORD,
           every(997)),
    Format("tfrecord, zlib", partial(records, pack=zlib.compress), RECORD, every(997)),
    Format("mds", mds, LINES, every(41, stop=TABLE_BYTES), opens=parent, stale=stale(mds)),
    Format("mds alone", partial(mds, indexed=False), LINES, every(41, stop=TABLE_BYTES)),
    Format("mds.zstd", partial(mds, pack=zstd, suffix=".zstd"), LINES, nowhere, opens=parent),
    Format("mds.gz", partial(mds, pack=gzip.compress, suffix=".gz", indexed=False), LINES,
           every(997, first=10)),
    Format("litdata", litdata, LEAF, every(41, stop=TABLE_BYTES), opens=parent,
           stale=stale(litdata)),
    Format("litdata.zstd", partial(litdata, pack=zstd, suffix=".zstd"), LEAF, nowhere,
           opens=parent),
    Format("megatron .idx", partial(megatron, suffix=".idx"), DOCUMENTS,
           every(53, first=34, stop=34 + 12 * NUM_SAMPLES), opens=without_suffix,
           stale=stale(partial(megatron, suffix=".idx"))),
    Format("megatron .bin", partial(megatron, suffix=".bin"), DOCUMENTS, nowhere),
    Format("arrow stream", partial(arrow, suffix=".arrow"), COLUMNS, nowhere),
    Format("arrow file", partial(arrow, suffix=".ipc"), COLUMNS, nowhere),
    Format("feather, lz4", partial(arrow, suffix=".feather", codec="lz4"), COLUMNS, nowhere),
    Format("parquet", parquet, COLUMNS, nowhere),
    Format("parquet with checksums", partial(parquet, write_page_checksum=True,
           write_page_index=True), COLUMNS, every(997, first=100, stop=9000)),
    Format("npy", npy, {"x": Array("arr_0", (6,), "int32")}, nowhere),
    Format("npz", npz, ARRAYS, nowhere),
    Format("npz, compressed", partial(npz, save=np.savez_compressed), ARRAYS, nowhere),
    Format("hdf5 with checksums", hdf5, ARRAYS, nowhere),
    Format("netcdf3", netcdf3, ARRAYS, nowhere),
]  # fmt: skip
EASIER = (
    *("jsonl.zst", "jsonl.gz, plain", "tfrec", "tfrecord.gz", "mds alone", "mds.gz", "litdata"),
    *("arrow stream", "feather, lz4", "parquet", "npz, compressed"),
)
"""Formats that fail only where another in the table does."""
OF_NO_CHECKSUM: Mapping[str, Sequence[str]] = {
    "megatron .bin": ("zeros at its start", IN_MIDDLE, AT_END, "all zeros"),
    "arrow stream": (IN_MIDDLE,),
    "npy": (IN_MIDDLE, AT_END),
    "npz": (IN_MIDDLE,),
    "netcdf3": (IN_MIDDLE, AT_END),
}
"""Cells in which numbers are other numbers, that nothing in these formats is checked against."""

each = pytest.mark.parametrize(
    "of",
    [
        pytest.param(of, id=of.name, marks=[pytest.mark.nightly] * (of.name in EASIER))
        for of in FORMATS
    ],
)


@each
def test_every_damage_is_noticed_or_harms_nothing(of: Format, tmp_path: Path) -> None:
    path = of.write(tmp_path)
    expected, data = samples_of(of, path), path.read_bytes()
    assert len(expected) == NUM_SAMPLES
    for name, damage in DAMAGES.items():
        path.write_bytes(damage(data))
        if name in OF_NO_CHECKSUM.get(of.name, ()):
            found = samples_of(of, path)
            assert len(found) == NUM_SAMPLES
            assert found != expected, f"{name}: is noticed or harms nothing by now"
            continue
        error = judge(path, of, [*expected, *expected] if name in REPEATS else expected)
        assert name != "nothing" or error is None


@each
def test_every_flipped_bit_that_is_covered_is_noticed(of: Format, tmp_path: Path) -> None:
    path = of.write(tmp_path)
    expected, data = samples_of(of, path), path.read_bytes()
    for at in of.checked(data):
        path.write_bytes(flip(data, at))
        judge(path, of, expected)


@pytest.mark.parametrize("of", [of for of in FORMATS if of.stale], ids=lambda of: of.name)
def test_an_index_of_before_changes_no_sample(of: Format, tmp_path: Path) -> None:
    assert of.stale is not None
    (tmp_path / "fresh").mkdir()
    fresh = samples_of(of, of.write(tmp_path / "fresh"))
    (tmp_path / "stale").mkdir()
    assert judge(of.stale(tmp_path / "stale"), of, fresh) is not None


@pytest.mark.parametrize("packing", ["best_fit", "concatenated"])
@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_sequences_are_not_made_of_a_damaged_index(
    suffix: str, packing: Any, tmp_path: Path
) -> None:
    path = megatron(tmp_path, suffix=suffix)
    data = path.read_bytes()
    fields: dict[str, Field] = {"t": Array("tokens", (17,), "uint16")}

    def read() -> list[Row] | DataioError:
        try:
            source = open_source(without_suffix(path), sequences=Sequences(16, packing=packing))
            return read_all(source, fields)
        except DataioError as error:
            return error

    expected = read()
    for name, damage in DAMAGES.items():
        path.write_bytes(damage(data))
        found = read()
        if isinstance(found, DataioError):
            assert "shard." in str(found)
        else:
            is_unseen = suffix == ".bin" and name in OF_NO_CHECKSUM["megatron .bin"]
            assert found == expected or is_unseen, name


def test_a_shard_that_others_were_joined_to_is_refused_wherever_its_indexes_lie(
    tmp_path: Path,
) -> None:
    """The last footer counts, and its places are those in the first file."""
    path = parquet(tmp_path, write_page_index=True)
    other = tmp_path / "other"
    other.mkdir()
    for first, second in (
        ({}, {}),
        ({}, {"write_page_index": True}),
        ({"compression": "none"}, {}),
    ):
        joined = parquet(other, **first).read_bytes() + parquet(other, **second).read_bytes()
        path.write_bytes(joined)
        with pytest.raises(DataioError, match=r"shard\.parquet: found .*joined as several shards"):
            open_source(str(path))


def test_a_stream_that_was_not_closed_is_refused(tmp_path: Path) -> None:
    """It may end between two record batches: nothing else would show what it lacks."""
    path = arrow(tmp_path, suffix=".arrow")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataioError, match=r"found the end of the file .* lack record batches"):
        open_source(str(path))


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_record_batches_without_rows_are_passed_over(new: Any, tmp_path: Path) -> None:
    """Writers cut a slice of no rows out of its columns, but not out of what is nested there."""
    held = pa.table({"x": list(range(50)), "n": [[{"a": i}] for i in range(50)]})
    (batch,) = held.to_batches()
    path = tmp_path / "shard.arrow"
    with new(path, held.schema) as writer:
        for each in (batch.slice(0, 0), batch, batch.slice(7, 0)):
            writer.write_batch(each)
    assert len(read_all(open_source(str(path)), {"x": Int("x")})) == 50
