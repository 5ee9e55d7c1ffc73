"""What is not an array file, or not as it was declared, is refused in one message with its cure."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import h5py
import netCDF4
import numpy as np
import pytest

from dataio import (
    Array,
    ArrayFiles,
    Bytes,
    Field,
    FieldError,
    Float,
    Int,
    Retry,
    SourceError,
    Text,
    Throttle,
    Tokens,
    open_source,
)
from dataio.base.errors import install_command
from dataio.source.formats.grids.zarr import ZarrFormat
from dataio.source.storage.files import Storage, StorageFile
from dataio.source.storage.retry import TransientError
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.source.shards import ids, read_all

numcodecs = pytest.importorskip("numcodecs", reason="comes with zarr")
zarr = pytest.importorskip("zarr", minversion="3", reason="needs Python 3.11: tonari[zarr]")

X = {"x": Array("x", (3,), "float32")}


def h5(path: Path, **variables: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in variables.items():
            file[name] = values
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": []}, "names is empty, expected files such as"),
        ({"tiles": {"lat": 0}}, r"tiles has 0 along 'lat', must be >= 1"),
        ({"axis": "t", "tiles": {"t": 2}}, r"along another axis than the row axis; give axis=None"),
        ({"strides": {"t": 1}}, "strides has 1 along 't', must be in .* axis that tiles names"),
        ({"tiles": {"t": 2}, "strides": {"t": 3}}, "strides has 3 along 't', must be in"),
        ({"edge": "wrap"}, r"edge is 'wrap', expected \"refuse\" or \"drop\""),
    ],
)
def test_a_wrong_declaration_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArrayFiles(**({"names": "a.h5"} | options))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.h5", r"none.h5: names no array file, expected files or directories ending in .h5"),
        ("*.nc", "names no array file"),
        ("text.h5", r"text.h5: begins with b'hello wo', expected a file of HDF5, NetCDF"),
        ("empty.h5", r"empty.h5: begins with b'', expected"),
        ("directory", r"names no array file"),
        ("bare.zarr", r"bare.zarr: names no array file"),
        ("{a.h5", r"the braces of .* do not match"),
    ],
)
def test_what_is_no_array_file_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "text.h5").write_text("hello world, this is no HDF5")
    (tmp_path / "empty.h5").touch()
    for directory in ("directory", "bare.zarr"):
        (tmp_path / directory).mkdir()
    with pytest.raises(SourceError, match=message):
        ArrayFiles(tmp_path / name).open()


def test_a_directory_names_the_array_files_in_it(tmp_path: Path) -> None:
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.full((2, 3), i, np.float32))
    (tmp_path / "notes.txt").write_text("no array")
    source = ArrayFiles(tmp_path, axis=None).open()
    rows = read_all(source, {"x": Array("arr_0", (2, 3), "float32")})
    assert [np.frombuffer(x, "f4")[0] for _, (x,) in rows] == [0, 1, 2]
    assert ArrayFiles([tmp_path / "2.npy", tmp_path / "0.npy"]).open().num_samples == 4


def test_every_rank_raises_what_one_found(tmp_path: Path) -> None:
    h5(tmp_path / "0.h5", x=np.zeros((2, 3), "f4"))
    (tmp_path / "1.h5").write_bytes((tmp_path / "0.h5").read_bytes()[:1000])

    def work(world: World) -> str:
        with pytest.raises(SourceError) as caught:
            ArrayFiles(tmp_path / "*.h5").open(world)
        return str(caught.value)

    first, second = run_threads(thread_worlds([2]), work)
    assert first == second
    assert "1.h5: h5py cannot read it" in first
    assert "truncated, damaged or still being written: copy or write it again" in first


def test_variables_of_other_lengths_need_named_dimensions(tmp_path: Path) -> None:
    path = h5(tmp_path / "a.h5", x=np.zeros((5, 3), "f4"), mask=np.zeros(3, "f4"))
    source = ArrayFiles(path).open()
    assert source.num_samples == 5
    with pytest.raises(FieldError, match=r"'mask' is 3 long along the axis 0, expected 5 as the l"):
        source.read(ids(0), {"mask": Float("mask")})
    dims = {"x": ("t", "place"), "mask": ("place",)}
    whole = ArrayFiles(path, axis="t", dims=dims).open()
    assert len(read_all(whole, X | {"mask": Array("mask", (3,), "float32")})) == 5
    with pytest.raises(
        SourceError, match=r"'x' has the shape \[5, 3\], expected the dimensions t;"
    ):
        ArrayFiles(path, dims={"x": ("t",)}).open()
    with pytest.raises(SourceError, match=r"of the axes 0, 't' two are one dimension of the larg"):
        ArrayFiles(path, axis=0, tiles={"t": 5}, dims=dims).open()
    with pytest.raises(
        SourceError, match=r"no variable has the axis 't', found mask\[3\], x\[5, 3"
    ):
        ArrayFiles(path, axis="t").open()


def test_files_without_rows_are_passed_over_unless_all_are(tmp_path: Path) -> None:
    for i, length in enumerate((0, 2, 0)):
        h5(tmp_path / f"{i}.h5", x=np.full((length, 3), i, "f4"))
    assert len(read_all(ArrayFiles(tmp_path / "*.h5").open(), X)) == 2
    with pytest.raises(SourceError, match="1 files hold no sample, expected at least one"):
        ArrayFiles(tmp_path / "0.h5").open()


def test_data_in_other_files_are_refused(tmp_path: Path) -> None:
    h5(tmp_path / "part.h5", x=np.zeros((4, 3), "f4"))
    layout = h5py.VirtualLayout((4, 3), "f4")
    layout[:] = h5py.VirtualSource(tmp_path / "part.h5", "x", (4, 3))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    with pytest.raises(SourceError, match=r"all.h5: the dataset 'x' lies in other files"):
        read_all(ArrayFiles(tmp_path / "all.h5").open(), X)


def test_values_of_any_length_and_text_are_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=1024) as file:
        ragged = file.create_dataset("ragged", 3, h5py.vlen_dtype(np.int32))
        packed = file.create_dataset("packed", 3, h5py.vlen_dtype(np.uint8))
        for i in range(3):
            ragged[i] = np.arange(i)
            packed[i] = np.frombuffer(b"abc"[:i], np.uint8)
        file["text"] = [f"é{i}" for i in range(3)]
        file["short"] = np.array([b"a", b"bc", b""])
        file["group/label"] = np.arange(3, dtype=np.int16)
        file["big"] = np.arange(3, dtype=">f4")
    fields: dict[str, Field] = {
        "label": Int("group/label"), "big": Float("big"), "tokens": Tokens("ragged"),
        "packed": Bytes("packed"), "text": Text("text"), "short": Text("short"),
    }  # fmt: skip
    rows = read_all(ArrayFiles(tmp_path / "a.h5").open(), fields)
    two = [np.arange(2, dtype="<i4").tobytes(), b"ab", "é2".encode(), b""]
    assert rows[2] == (2, [np.int64(2).tobytes(), np.float32(2).tobytes(), *two])


def test_files_may_hold_different_lengths(tmp_path: Path) -> None:
    for i in range(4):
        np.savez(tmp_path / f"{i}.npz", tokens=np.arange(1 + i % 2 * 3, dtype=np.int32))
    rows = read_all(ArrayFiles(tmp_path, axis=None).open(), {"t": Tokens("tokens")})
    assert [len(tokens) // 4 for _, (tokens,) in rows] == [1, 4, 1, 4]


@pytest.mark.parametrize("num_variables", [1, 2])
def test_records_of_odd_lengths_are_found(tmp_path: Path, num_variables: int) -> None:
    values = np.arange(21, dtype=np.int8).reshape(7, 3)
    with netCDF4.Dataset(tmp_path / "a.nc", "w", format="NETCDF3_CLASSIC") as file:
        file.createDimension("t", None)
        file.createDimension("c", 3)
        for i in range(num_variables):
            file.createVariable(f"v{i}", "i1", ("t", "c"))[:] = values + i
    source = ArrayFiles(tmp_path / "a.nc", axis="t").open()
    for i in range(num_variables):
        rows = read_all(source, {"x": Array(f"v{i}", (3,), "int8")})
        assert [x for _, (x,) in rows] == [row.tobytes() for row in values + i]


def test_numbers_that_are_stored_unlike_in_memory_are_read_by_h5py(tmp_path: Path) -> None:
    kind = h5py.h5t.STD_I32LE.copy()
    kind.set_precision(16)
    kind.set_offset(8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((4,))
        made = h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, space))
        made[...] = np.arange(4)
    rows = read_all(ArrayFiles(tmp_path / "a.h5").open(), {"x": Int("x")})
    assert [x for _, (x,) in rows] == [np.int64(i).tobytes() for i in range(4)]


def test_a_dimension_that_has_no_variable_is_not_listed(tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("t", 4)
        file.createVariable("x", "f4", ("t",))[:] = np.arange(4)
    with pytest.raises(FieldError, match=r"a.nc: holds x\[t 4\], expected 't' for field 'y'"):
        ArrayFiles(tmp_path / "a.nc", axis="t").open().read(ids(0), {"y": Float("t")})


def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = h5(tmp_path / "a.h5", x=np.zeros((4, 3), "f4"))
    source = ArrayFiles(path).open()
    h5(path, x=np.zeros((400, 3), "f4"))
    with pytest.raises(SourceError, match=r"a.h5: is \d+ bytes long, was \d+ bytes long when surv"):
        read_all(source, X)
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    group.create_array("x", data=np.zeros((4, 3), "f4"))
    source = ArrayFiles(tmp_path / "a.zarr").open()
    group.create_array("x", data=np.zeros((4, 4), "f4"), overwrite=True)
    with pytest.raises(SourceError, match=r"'x' is float32\[4, 4\], was float32\[4, 3\] when"):
        read_all(source, X)


@pytest.mark.parametrize("kind", ["h5", "nc", "npz"])
def test_a_request_that_fails_is_made_again_and_an_error_that_stays_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    values, path = np.arange(30, dtype="f4").reshape(10, 3), tmp_path / f"a.{kind}"
    if kind == "h5":
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=values, chunks=(5, 3), compression="gzip")
    elif kind == "npz":
        np.savez_compressed(path, x=values)
    else:
        with netCDF4.Dataset(path, "w", format="NETCDF3_CLASSIC") as made:
            made.createDimension("t", 10)
            made.createDimension("c", 3)
            made.createVariable("x", "f4", ("t", "c"))[:] = values
    failing = iter(range(3))
    checked = StorageFile._checked

    def fail(self: StorageFile, *given: Any) -> Any:
        if next(failing, None) is not None:
            raise TransientError("the server is away")
        return checked(self, *given)

    monkeypatch.setattr(StorageFile, "_checked", fail)
    retry = Retry(sleep=lambda _: None)
    rows = read_all(ArrayFiles(path, retry=retry).open(), X)
    assert [x for _, (x,) in rows] == [row.tobytes() for row in values]
    assert retry.num_retries == 3
    source = ArrayFiles(path, retry=Retry(retry_s=0, sleep=lambda _: None)).open()
    failing = iter(range(1000))
    with pytest.raises(SourceError, match=rf"^[^:]*a.{kind}: reading \d+ bytes at \d+ failed once"):
        read_all(source, X)


def test_a_throttle_counts_every_byte(tmp_path: Path) -> None:
    path = h5(tmp_path / "a.h5", x=np.zeros((4, 3), "f4"))
    throttle = Throttle(tmp_path / "throttle")
    source = ArrayFiles(path, throttle=throttle).open()
    read_all(source, X)
    assert throttle.total_bytes == source.bytes_read > 0


@pytest.mark.usefixtures("zarr_reader")
@pytest.mark.parametrize("version", [2, 3])
def test_an_array_within_a_store_opens_by_its_path(tmp_path: Path, version: Any) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    group.create_array("deep/x", data=values)
    source = open_source(tmp_path / "a.zarr" / "deep" / "x")
    (rows,) = source.read(np.arange(4), {"x": Array("arr_0", (3,), "float32")})
    assert np.array_equal(rows.fixed[0].view(np.float32), values)


@pytest.mark.parametrize(("name", "library"), [("a.h5", "h5py"), ("a.zarr", "zarr")])
def test_a_library_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    h5(tmp_path / "a.h5", x=np.zeros((4, 3), "f4"))
    zarr.open_group(tmp_path / "a.zarr", mode="w")
    monkeypatch.setitem(sys.modules, library, None)
    extra = {"h5py": "hdf5", "zarr": "zarr"}[library]
    message = f"{library}, which reads it, is not installed; run `{install_command(extra)}` on"
    with pytest.raises(SourceError, match=re.escape(message)):
        ArrayFiles(tmp_path / name).open()


def test_no_library_is_imported_before_it_is_needed() -> None:
    program = "import sys, dataio; print({'h5py', 'zarr', 'netCDF4'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "set()\n"


@pytest.mark.usefixtures("zarr_reader")
def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((40, 3))
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=3)
    group.create_array("x", data=values, chunks=(10, 3))
    chunk = tmp_path / "a.zarr/x/c/2/0"
    chunk.write_bytes(chunk.read_bytes()[:20])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", data=values, chunks=(10, 3), compression="gzip")
        start = made.id.get_chunk_info(2).byte_offset
    with (tmp_path / "a.h5").open("r+b") as raw:
        raw.seek(start)
        raw.write(b"damaged, as a bad disk does it")
    np.savez_compressed(tmp_path / "a.npz", x=values)
    packed = bytearray((tmp_path / "a.npz").read_bytes())
    packed[200:230] = bytes(30)
    (tmp_path / "a.npz").write_bytes(packed)
    fields: dict[str, Field] = {"x": Array("x", (3,), "float64")}
    for name in ("a.zarr", "a.h5", "a.npz"):
        with pytest.raises(SourceError, match=rf"{name}.* cannot .*read .*write it again"):
            read_all(ArrayFiles(tmp_path / name).open(), fields)


@pytest.mark.usefixtures("zarr_reader")
def test_a_chunk_that_was_cut_off_is_found_whatever_compressed_it(tmp_path: Path) -> None:
    for codec in (numcodecs.Blosc(), numcodecs.GZip(), numcodecs.Zlib()):
        group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
        # Nothing of it is made smaller
        values = np.frombuffer(np.random.default_rng(0).bytes(800), np.int64)
        group.create_array("deep/x", data=values, chunks=(50,), compressors=codec)
        source = ArrayFiles(tmp_path / "a.zarr").open()
        assert len(read_all(source, {"x": Array("deep/x", (), "int64")})) == 100
        chunk = tmp_path / "a.zarr/deep/x/1"
        chunk.write_bytes(chunk.read_bytes()[:-30])
        with pytest.raises(SourceError, match=r"a.zarr: zarr cannot read it .* write it again"):
            read_all(source, {"x": Array("deep/x", (), "int64")})


@pytest.mark.usefixtures("zarr_reader")
def test_blosc_reads_nothing_behind_a_chunk_that_was_cut_off(tmp_path: Path) -> None:
    """Of a shard and of a single number; what lies behind in memory would be values."""
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=3)
    options: dict[str, Any] = {"compressors": zarr.codecs.BloscCodec()}
    shards = {"shape": (50,), "index_location": "start"}
    values = np.random.default_rng(0).random(100)
    group.create_array("x", data=values, chunks=(10,), shards=shards, **options)
    group.create_array("scale", data=values[0], **options)
    for name, box, found in (
        ("x/c/0", (slice(42, 48),), r"\d+ to \d+ in it"),
        ("x/c/1", (slice(50, 100),), "all chunks of its index in it"),
        ("scale/c", (), r"\d+ as Blosc wrote"),
    ):  # fmt: skip
        file = tmp_path / "a.zarr" / name
        file.write_bytes(file.read_bytes()[:-10])
        with ZarrFormat().opened(Storage(), str(tmp_path / "a.zarr")) as store:
            with pytest.raises(SourceError, match=rf"{name} has \d+ bytes, expected {found}"):
                store.read(name.partition("/")[0], box)


def test_a_chunk_of_blosc_with_a_negative_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    options: dict[str, Any] = {"zarr_format": 2, "compressors": numcodecs.Blosc()}
    zarr.create_array(path, data=np.arange(10), chunks=(10,), **options)
    data = bytearray((path / "0").read_bytes())
    data[4:8] = b"\xff" * 4
    (path / "0").write_bytes(data)
    with (
        ZarrFormat().opened(Storage(), str(path)) as store,
        pytest.raises(SourceError, match=r"a.zarr: zarr cannot read it .* write it again"),
    ):
        store.read("arr_0", (slice(0, 5),))


def test_chunks_of_no_length_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_array(path, data=np.zeros(10), chunks=(5,), zarr_format=3)
    text = (path / "zarr.json").read_text()
    pattern = r'("chunk_shape": \[\s*)5'
    (path / "zarr.json").write_text(re.sub(pattern, r"\g<1>0", text))
    with (
        pytest.raises(SourceError, match=r"a.zarr: zarr cannot read it .*(zero|must be)"),
        ZarrFormat().opened(Storage(), str(path)) as store,
    ):
        store.read("arr_0", (slice(0, 5),))


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_rows_appended_behind_what_lists_a_store_are_read(tmp_path: Path, version: Any) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    array = group.create_array("x", data=np.zeros((2, 3), "f4"))
    zarr.consolidate_metadata(tmp_path / "a.zarr")
    array.resize((4, 3))
    assert ArrayFiles(tmp_path / "a.zarr").open().num_samples == 4


def test_files_whose_dimensions_stand_in_another_order_are_refused(tmp_path: Path) -> None:
    """Samples of a square would be turned, in part of the files, and nobody would see it."""
    for name, dims in (("a", ["time", "lat", "lon"]), ("b", ["time", "lon", "lat"])):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            made = file.create_dataset("x", data=np.zeros((2, 3, 3), np.float32))
            for each, dim in zip(made.dims, dims, strict=True):
                each.label = dim
    source = ArrayFiles(tmp_path / "*.h5", axis="time").open()
    with pytest.raises(FieldError, match=r"b.h5: .* has the dimensions lon, lat, and lat, lon in"):
        source.read(np.arange(4), {"x": Array("x", (3, 3), "float32")})


UNITS = {"scale_factor": (0.1, 0.2), "add_offset": (0, 5.0), "units": ("h since 1", "h since 2")}


@pytest.mark.parametrize("kind", ["NETCDF4", "NETCDF3_CLASSIC", "zarr"])
@pytest.mark.parametrize("key", UNITS)
def test_files_that_pack_numbers_otherwise_are_refused(tmp_path: Path, kind: Any, key: str) -> None:
    for number, value in enumerate(UNITS[key]):
        path = tmp_path / str(number)
        if kind == "zarr":
            group = zarr.open_group(path, mode="w")
            group.create_array("x", data=np.arange(4)).attrs[key] = value
            continue
        with netCDF4.Dataset(path, "w", format=kind) as file:
            file.createDimension("t", 4)
            made = file.createVariable("x", "i2", ("t",))
            made[:] = np.arange(4)
            made.setncattr(key, value)
    message = rf"1: the variable 'x' has {key} {UNITS[key][1]}, and .*in .*/0, .*; write them again"
    with pytest.raises(FieldError, match=message):
        read_all(ArrayFiles([tmp_path / "0", tmp_path / "1"]).open(), {"x": Int("x")})
    assert len(read_all(ArrayFiles([tmp_path / "1"] * 2).open(), {"x": Int("x")})) == 8


@pytest.mark.usefixtures("zarr_reader")
@pytest.mark.parametrize("version", [2, 3])
def test_a_store_may_be_one_array_with_chunks_of_fill(tmp_path: Path, version: Any) -> None:
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=(4, 3), chunks=(2, 3), dtype="f4", fill_value=7,
        zarr_format=version,
    )  # fmt: skip
    array[:2] = 1
    rows = read_all(ArrayFiles(tmp_path / "a.zarr").open(), {"x": Array("arr_0", (3,), "float32")})
    assert [np.frombuffer(x, "f4")[0] for _, (x,) in rows] == [1, 1, 7, 7]


@pytest.mark.parametrize("name", ["a.h5", "a.npz", "a.zarr"])
def test_an_error_of_a_field_is_not_taken_for_a_damaged_file(tmp_path: Path, name: str) -> None:
    class Strict:
        key = "x"

        def column(self, name: str) -> None:
            return None

        def encode(self, raw: object, where: str) -> bytes:
            raise ValueError("of its own")

    # More than a block: rows are made while the file is open.
    values = np.zeros((1 << 20, 3), "f4")
    h5(tmp_path / "a.h5", x=values)
    np.savez_compressed(tmp_path / "a.npz", x=values)
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("x", data=values)
    with pytest.raises(ValueError, match=r"^of its own$"):
        read_all(ArrayFiles(tmp_path / name).open(), {"x": Strict()})


@pytest.mark.usefixtures("zarr_reader")
def test_files_and_stores_behind_urls_are_read(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    h5(tmp_path / "a.h5", x=np.full((4, 3), 2, "f4"))
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    group.create_array("x", data=np.full((4, 3), 2, "f4"))
    np.savez(tmp_path / "a.npz", x=np.full((4, 3), 2, "f4"))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/grids/{path.relative_to(tmp_path)}", path.read_bytes())
    try:
        for name in ("a.h5", "a.zarr", "a.npz", "*.h5"):
            source = ArrayFiles(f"memory://grids/{name}").open()
            assert [x for _, (x,) in read_all(source, X)] == [np.full(3, 2, "f4").tobytes()] * 4
            assert source.bytes_read > 48
    finally:
        memory.rm("/grids", recursive=True)
