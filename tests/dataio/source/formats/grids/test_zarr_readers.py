"""Zarr by tensorstore: the same bytes and the same refusals as by zarr-python, or zarr-python."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataio.base.errors import SourceError
from dataio.source.formats.grids.zarr import ZarrFormat
from dataio.source.storage.files import Storage, StorageFile
from tests.cases import diagonal

numcodecs = pytest.importorskip("numcodecs", reason="comes with zarr")
zarr = pytest.importorskip("zarr", minversion="3", reason="needs Python 3.11: tonari[zarr]")
pytest.importorskip("tensorstore", reason="is an extra: tonari[tensorstore]")

SHAPE, CHUNKS, SHARDS = (13, 11, 10), (4, 3, 5), (8, 9, 10)
BOXES = [[(0, 13), (0, 11), (0, 10)], [(3, 9), (5, 6), (2, 9)], [(12, 13), (10, 11), (9, 10)],
         [(2, 2), (0, 3), (0, 3)]]  # fmt: skip
CODECS = {
    "none": None, "blosc": numcodecs.Blosc("zstd", shuffle=2), "zstd": numcodecs.Zstd(1),
    "gzip": numcodecs.GZip(1), "zlib": numcodecs.Zlib(1), "bz2": numcodecs.BZ2(),
    "lz4": numcodecs.LZ4(), "lzma": numcodecs.LZMA(),
}  # fmt: skip
V3: dict[str, dict[str, Any]] = {
    "chunks": {},
    "gzip 3": {"compressors": zarr.codecs.GzipCodec()},
    "blosc 3": {"compressors": zarr.codecs.BloscCodec()},
    "shards": {"shards": SHARDS},
    "index first": {"shards": {"shape": SHARDS, "index_location": "start"}},
}
DTYPES = "? i1 <u2 >i4 <i8 <f2 >f4 <f8 <c8 <M8[ns] <m8[s] S3 U4".split()


def write(path: Path, dtype: str = "<f4", **options: Any) -> Any:
    """Write an array of which some chunks are not there."""
    group = zarr.open_group(path, mode="w", zarr_format=options.pop("version", 2))
    array = group.create_array("deep/x", shape=SHAPE, dtype=dtype, **{"chunks": CHUNKS} | options)
    values = np.random.default_rng(0).integers(0, 100, SHAPE).astype(dtype)
    if values.dtype.kind in "fc":
        values[6, 2, 1] = -np.nan
    array[5:, :9] = values[5:, :9]
    return array


def outcome(path: Path, box: list[tuple[int, int]]) -> tuple[object, ...]:
    """Read a region: what comes, or what is raised."""
    with ZarrFormat().opened(Storage(), str(path)) as file:
        try:
            found = file.read("deep/x", tuple(slice(*part) for part in box))
        except SourceError as error:
            return (str(error),)
    return found.dtype, found.shape, found.tobytes()


def compare(path: Path, caplog: pytest.LogCaptureFixture) -> tuple[list[Any], list[str]]:
    """Read all regions by both: what came of zarr-python, and why it read for tensorstore."""
    caplog.set_level(logging.DEBUG, "dataio.source.formats.grids")
    caplog.clear()
    found = [outcome(path, box) for box in BOXES]
    reasons = [*caplog.messages]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorstore", None)
        expected = [outcome(path, box) for box in BOXES]
    assert found == expected
    return expected, reasons


@diagonal(dtype=DTYPES, codec=[*CODECS])
def test_version_2_gives_the_same_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str, codec: str
) -> None:
    is_number = np.dtype(dtype).kind in "biufc"
    for order, fill in (("C", None), ("F", 7 if is_number else None), ("C", 1)):
        if not is_number and fill:
            continue
        options = {"compressors": CODECS[codec], "order": order, "fill_value": fill}
        write(tmp_path / "a.zarr", dtype, **options)
        _, reasons = compare(tmp_path / "a.zarr", caplog)
        assert bool(reasons) == (not is_number or codec not in ("none", "blosc", "zstd")), reasons
        for each in reasons:
            assert ": zarr-python reads deep/x: " in each
            assert (codec if is_number else f"its values are {np.dtype(dtype)}") in each


@diagonal(layout=V3, dtype=["?", ">i4", "<f2", ">f4", "<c16", "<M8[ns]"])
@pytest.mark.filterwarnings("ignore:The data type")
def test_version_3_gives_the_same_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str, layout: str
) -> None:
    for fill in {"f": (0, np.nan, -0.0), "c": (complex(1, np.nan),)}.get(np.dtype(dtype).kind, ()):
        write(tmp_path / "a.zarr", dtype, version=3, fill_value=fill, **V3[layout])
        assert bool(compare(tmp_path / "a.zarr", caplog)[1]) == (layout == "gzip 3")
    write(tmp_path / "a.zarr", dtype, version=3, **V3[layout])
    is_left = "M8" in dtype or layout == "gzip 3"
    assert bool(compare(tmp_path / "a.zarr", caplog)[1]) == is_left


def test_filters_and_codecs_that_it_lacks_are_read_by_zarr_python(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.zarr", "<i4", filters=[numcodecs.Delta("<i4")])
    assert "filters" in compare(tmp_path / "a.zarr", caplog)[1][0]
    big = [zarr.codecs.BytesCodec(endian="big")]
    sharded = zarr.codecs.ShardingCodec(chunk_shape=CHUNKS, index_codecs=big)
    others: list[tuple[dict[str, Any], str]] = [
        ({"compressors": zarr.codecs.Crc32cCodec()}, "its chunks are packed by crc32c"),
        ({"filters": zarr.codecs.TransposeCodec(order=(2, 0, 1))}, "codecs are transpose, bytes"),
        ({"serializer": sharded, "chunks": SHARDS, "compressors": None}, "index of its shards is"),
    ]
    for options, reason in others:
        write(tmp_path / "a.zarr", version=3, **options)
        assert reason in compare(tmp_path / "a.zarr", caplog)[1][0]


def test_a_version_that_aborts_forks_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.zarr")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.1.73")
    assert (
        "tensorstore is 0.1.73, which aborts all forks"
        in compare(tmp_path / "a.zarr", caplog)[1][0]
    )


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-30],
    "cut by a byte": lambda data: data[:-1],
    "begun": lambda data: data[:5],
    "empty": lambda _: b"",
    "longer": lambda data: data + bytes(30),
    "zeros": lambda data: data[:10] + bytes(20) + data[30:],
    "zeros at the end": lambda data: data[:-8] + bytes(8),
}


@diagonal(written=[*CODECS, *V3], damage=DAMAGES)
def test_what_is_damaged_is_refused_in_the_same_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: str, damage: str
) -> None:
    options = V3[written] | {"version": 3} if written in V3 else {"compressors": CODECS[written]}
    write(tmp_path / "a.zarr", **options)
    chunk = tmp_path / "a.zarr/deep/x" / ("c/1/0/0" if written in V3 else "1.0.0")
    chunk.write_bytes(DAMAGES[damage](chunk.read_bytes()))
    expected, reasons = compare(tmp_path / "a.zarr", caplog)
    if damage in ("cut", "cut by a byte", "begun", "empty") and written not in ("lz4", "lzma"):
        assert "zarr cannot read it" in expected[0][0]
        assert reasons, "tensorstore must not deliver what zarr-python refuses"


@pytest.mark.parametrize("layout", V3)
def test_it_reads_no_more_than_the_chunks_and_the_index(tmp_path: Path, layout: str) -> None:
    write(tmp_path / "a.zarr", version=3, **V3[layout])
    read = []
    with pytest.MonkeyPatch.context() as patch:
        for _ in ("by tensorstore", "by zarr-python"):
            with ZarrFormat().opened(Storage(), str(tmp_path / "a.zarr")) as file:
                storage = file.chunks._store._storage
                before = storage.bytes_read
                file.read("deep/x", (slice(2, 9), slice(0, 3), slice(0, 5)))
                read.append(storage.bytes_read - before)
            patch.setitem(sys.modules, "tensorstore", None)
    assert 0 < read[0] <= read[1]


def test_an_error_of_the_storage_is_raised_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr")

    def fail(*_: Any) -> bytes:
        raise SourceError("the server is away")

    with ZarrFormat().opened(Storage(), str(tmp_path / "a.zarr")) as file:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StorageFile, "read_at", fail)
            with pytest.raises(SourceError, match=r"^the server is away$"):
                file.read("deep/x", tuple(map(slice, SHAPE)))
        assert file.read("deep/x", tuple(map(slice, SHAPE))).shape == SHAPE


FORKS = """
import os, sys, logging
from tests.dataio.source.formats.grids.test_zarr_readers import BOXES, outcome
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(message)s")
expected = outcome(sys.argv[1], BOXES[0])
print("parent read", flush=True)
child = os.fork()
if not child:
    same = outcome(sys.argv[1], BOXES[0]) == expected
    print("child read", same, flush=True)
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


def test_a_fork_of_a_process_that_uses_it_reads_by_zarr_python(tmp_path: Path) -> None:
    """Tensorstore aborts a process that was forked from one with its threads."""
    write(tmp_path / "a.zarr")
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path / "a.zarr")],
        capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("parent read")
    assert "zarr-python reads" not in before
    assert "zarr-python reads deep/x: this process was forked" in after
    assert after.endswith("child read True\n")
