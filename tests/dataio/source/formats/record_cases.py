"""The rows of the table of sources that are files of records."""

import bz2
import gzip
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from dataio.rows.fields import Array, Bytes, Field, Float, Image, Int, Text, Tokens
from tests.dataio.source.cases import Case
from tests.dataio.source.formats.record_samples import NUM_SAMPLES, sample

GOLDEN = Path(__file__).parents[3] / "golden" / "records"
LARGE = 600
"""Samples of some 8 KB."""

NUMBERS: Mapping[str, Field] = {
    "label": Int("label"),
    "score": Float("score"),
    "fixed": Array("fixed", (2, 3), "float32"),
    "vector": Tokens("vector", length=8, pad=-1),
    "text": Text("text"),
}
IMAGE: Mapping[str, Field] = {"picture": Image("picture"), "raw": Bytes("raw")}


def numbers(number: int) -> dict[str, Any]:
    values = sample(number)
    padded = np.full(8, -1, np.int32)
    vector = values["vector"][:8]
    padded[: len(vector)] = vector
    return {
        "label": values["label"], "score": values["score"], "fixed": values["fixed"],
        "vector": padded, "text": values["text"],
    }  # fmt: skip


def numbers_and_image(number: int) -> dict[str, Any]:
    values = sample(number)
    return numbers(number) | {
        "picture": values["picture"].transpose(2, 0, 1), "raw": values["raw"],
    }  # fmt: skip


def copied(name: str) -> Callable[[Path], str]:
    """Copy what a library wrote."""

    def write(directory: Path) -> str:
        if (GOLDEN / name).is_dir():
            shutil.copytree(GOLDEN / name, directory, dirs_exist_ok=True)
            return str(directory)
        return str(shutil.copy(GOLDEN / name, directory))

    return write


def truncated(name: str, pattern: str, num_bytes: int) -> Callable[[Path], str]:
    """Copy what a library wrote, and cut the last bytes off one file of it."""

    def write(directory: Path) -> str:
        spec = copied(name)(directory)
        path = sorted(directory.glob(pattern))[-1]
        path.write_bytes(path.read_bytes()[:-num_bytes])
        return spec

    return write


def without_a_shard(directory: Path) -> str:
    spec = copied("mds")(directory)
    (directory / "shard.00001.mds").unlink()
    return spec


def noise(number: int) -> bytes:
    """8 KB that do not compress."""
    return np.random.default_rng(number).bytes(8000)


def packed(parts: Sequence[bytes], between: bytes = b"") -> bytes:
    """Write a table of offsets, and what it points to."""
    start = 4 * (len(parts) + 2) + len(between)
    offsets = start + np.cumsum([0, *map(len, parts)])
    head = np.array([len(parts), *offsets], "<u4").tobytes()
    return head + between + b"".join(parts)


def large_mds(pack: Callable[[bytes], bytes] = bytes, suffix: str = "") -> Any:
    def write(directory: Path) -> tuple[str, Mapping[str, Field]]:
        columns = {
            "column_names": ["raw"], "column_encodings": ["bytes"], "column_sizes": [None],
            "version": 2,
        }  # fmt: skip
        parts = [(8000).to_bytes(4, "little") + noise(i) for i in range(LARGE)]
        data = packed(parts, json.dumps(columns).encode())
        path = directory / f"shard.00000.mds{suffix}"
        path.write_bytes(pack(data))
        return str(path), {"raw": Bytes("raw")}

    return write


def large_litdata(pack: Callable[[bytes], bytes] = bytes, suffix: str = "") -> Any:
    def write(directory: Path) -> tuple[str, Mapping[str, Field]]:
        leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
        config = {
            "data_format": ["bytes"], "data_spec": json.dumps([1, leaf]), "compression": None,
        }  # fmt: skip
        name = f"chunk-0-0{suffix}.bin"
        index = {"chunks": [{"filename": name, "chunk_size": LARGE}], "config": config}
        (directory / "index.json").write_text(json.dumps(index))
        parts = [(8000).to_bytes(4, "little") + noise(i) for i in range(LARGE)]
        (directory / name).write_bytes(pack(packed(parts)))
        return str(directory), {"raw": Bytes("0")}

    return write


def framed(data: bytes) -> bytes:
    """Write one record of TFRecord."""

    def crc(part: bytes) -> bytes:
        value = google_crc32c.value(part)
        masked = int((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF
        return masked.to_bytes(4, "little")

    head = len(data).to_bytes(8, "little")
    return head + crc(head) + data + crc(data)


def large_tfrecord(pack: Callable[[bytes], bytes] = bytes, suffix: str = "") -> Any:
    def write(directory: Path) -> tuple[str, Mapping[str, Field]]:
        path = directory / f"x.tfrecord{suffix}"
        path.write_bytes(pack(b"".join(framed(noise(i)) for i in range(LARGE))))
        return str(path), {"raw": Bytes("__record__")}

    return write


def bad_crc(directory: Path) -> str:
    path = Path(copied("train.tfrecord-00000-of-00001")(directory))
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    return str(path)


def json_lines(pack: Callable[[bytes], bytes] = bytes, suffix: str = "", bad: bytes = b"") -> Any:
    def write(directory: Path) -> str:
        lines = []
        for number in range(NUM_SAMPLES):
            values = sample(number)
            document = {key: values[key] for key in ("text", "label", "score", "meta")}
            document |= {key: values[key].tolist() for key in ("fixed", "vector")}
            lines.append(json.dumps(document).encode())
        lines[7] = bad or lines[7]
        path = directory / f"train.v1.2.jsonl{suffix}"
        # Blank lines are no samples; the last line has no end.
        path.write_bytes(pack(b"\n\n".join(lines)))
        return str(path)

    return write


def large_json_lines(pack: Callable[[bytes], bytes] = bytes, suffix: str = "") -> Any:
    def write(directory: Path) -> tuple[str, Mapping[str, Field]]:
        path = directory / f"x.ndjson{suffix}"
        lines = [json.dumps({"raw": noise(i).hex()}).encode() + b"\n" for i in range(LARGE)]
        path.write_bytes(pack(b"".join(lines)))
        return str(path), {"raw": Bytes("raw")}

    return write


def write_megatron(
    path: Path, sequences: Sequence[np.ndarray], documents: Sequence[int], code: int = 8
) -> str:
    """Write an indexed dataset as Megatron's builder does, whose package does not install alone."""
    lengths = np.array([len(each) for each in sequences])
    nbytes = np.cumsum([0, *(each.nbytes for each in sequences)])
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([code])
    counts = np.array([len(sequences), len(documents)], "<u8").tobytes()
    tables = lengths.astype("<i4"), nbytes[:-1].astype("<i8"), np.array(documents, "<i8")
    Path(f"{path}.idx").write_bytes(head + counts + b"".join(each.tobytes() for each in tables))
    Path(f"{path}.bin").write_bytes(b"".join(each.tobytes() for each in sequences))
    return str(path)


def tokens(number: int) -> np.ndarray:
    return (np.arange(number % 5 + 1) + 60000 + number).astype("<u2")


def megatron(directory: Path) -> str:
    sequences = [tokens(number) for number in range(NUM_SAMPLES)]
    # Documents of 4 sequences each; behind them the number of all.
    return write_megatron(directory / "my_text.v2_document", sequences, [0, 4, 8, 12])


def megatron_sample(number: int) -> dict[str, Any]:
    padded = np.zeros(6, np.int32)
    padded[: len(tokens(number))] = tokens(number)
    return {"tokens": padded, "document": number // 4}


def large_megatron(directory: Path) -> tuple[str, Mapping[str, Field]]:
    sequences = [np.frombuffer(noise(i), "<u2") for i in range(LARGE)]
    name = write_megatron(directory / "x", sequences, [0, LARGE])
    return f"{name}.bin", {"tokens": Tokens("tokens", dtype="uint16")}


def truncated_megatron(directory: Path) -> str:
    path = Path(f"{megatron(directory)}.bin")
    path.write_bytes(path.read_bytes()[:-1])
    return str(path)


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


LINES: Mapping[str, Field] = {**NUMBERS,
    "id": Int("meta.id"), "name": Text("meta.deep.name"), "tags": Array("meta.tags", (2,), "int16"),
}  # fmt: skip


def line_sample(number: int) -> dict[str, Any]:
    return numbers(number) | {
        "id": number, "name": f"n{number}", "tags": np.array([number, number + 1], np.int16),
    }  # fmt: skip


MDS_FIELDS: Mapping[str, Field] = {
    **NUMBERS, **IMAGE, "small": Int("small"), "digits": Int("digits"), "id": Int("meta.id"),
    "name": Text("meta.deep.name"), "png": Image("png"), "meta": Text("meta"),
}  # fmt: skip


def mds_sample(number: int) -> dict[str, Any]:
    values = sample(number)
    return numbers_and_image(number) | {
        "small": number, "digits": values["digits"], "id": number, "name": f"n{number}",
        "png": values["png"].transpose(2, 0, 1), "meta": json.dumps(values["meta"]),
    }  # fmt: skip


LIT_FIELDS: Mapping[str, Field] = {
    **NUMBERS, **IMAGE, "id": Int("meta.id"), "name": Text("meta.name"), "digits": Int("digits"),
}  # fmt: skip


def lit_sample(number: int) -> dict[str, Any]:
    extra = {"id": number, "name": f"n{number}", "digits": 10**12 + number}
    return numbers_and_image(number) | extra


TF_FIELDS: Mapping[str, Field] = {**NUMBERS, "raw": Bytes("raw"), "signed": Int("signed")}


def tf_sample(number: int) -> dict[str, Any]:
    return numbers(number) | {"raw": sample(number)["raw"], "signed": -1 - number}


FROM_THE_START = 1.1
"""Of a compressed shard: read-ahead may reach its end."""

RECORDS = [
    Case(
        "mds", copied("mds"), MDS_FIELDS, mds_sample, NUM_SAMPLES, large_mds(), 0.55,
        truncated("mds", "*.mds", 9), r"shard\.00001\.mds: is \d+ bytes long, expected \d+ bytes",
    ),
    Case(
        "mds-zstd", copied("mds_zstd"), MDS_FIELDS, mds_sample, NUM_SAMPLES,
        large_mds(zstd, ".zstd"), FROM_THE_START,
        truncated("mds_zstd", "*.zstd", 9), r"00001\.mds\.zstd: is \d+ bytes long, expected",
    ),
    Case(
        "mds-gz", copied("mds_gz"), MDS_FIELDS, mds_sample, NUM_SAMPLES,
        large_mds(gzip.compress, ".gz"), FROM_THE_START,
        truncated("mds_gz", "*.gz", 900), r"00001\.mds\.gz: is \d+ bytes long, expected",
    ),
    Case(
        "mds-bz2", copied("mds"), MDS_FIELDS, mds_sample, NUM_SAMPLES,
        large_mds(bz2.compress, ".bz2"), FROM_THE_START,
        without_a_shard, r"index\.json: names 2 shards, of which 1 are missing.*exclude=\['.*'\]",
    ),
    Case(
        "litdata", copied("litdata"), LIT_FIELDS, lit_sample, NUM_SAMPLES, large_litdata(), 0.55,
        truncated("litdata", "*.bin", 9), r"chunk-0-2\.bin: ends in the middle of its 4 samples",
    ),
    Case(
        "litdata-zstd", copied("litdata_zstd"), LIT_FIELDS, lit_sample, NUM_SAMPLES,
        large_litdata(zstd, ".zstd"), FROM_THE_START,
        copied("litdata_frames"), r"index\.json: the chunks have the compression 'zstd' \(level",
    ),
    Case(
        "tfrecord", copied("train.tfrecord-00000-of-00001"), TF_FIELDS, tf_sample, NUM_SAMPLES,
        large_tfrecord(), 0.6, bad_crc,
        r"-of-00001: record 11 at byte \d+: found a record that its checksum does not match",
    ),
    Case(
        "tfrecord-gz", copied("train.tfrecord.gz"), TF_FIELDS, tf_sample, NUM_SAMPLES,
        large_tfrecord(gzip.compress, ".gz"), FROM_THE_START,
        truncated("train.tfrecord.gz", "*.gz", 100), r"train\.tfrecord\.gz: .*(damaged|truncated)",
    ),
    Case(
        "jsonl", json_lines(), LINES, line_sample, NUM_SAMPLES, large_json_lines(), 0.6,
        json_lines(bad=b'{"label": 3'), r"jsonl: sample 7 at byte \d+: found b'\{\"label\": 3'",
    ),
    Case(
        "jsonl-gz", json_lines(gzip.compress, ".gz"), LINES, line_sample, NUM_SAMPLES,
        large_json_lines(gzip.compress, ".gz"), FROM_THE_START,
        json_lines(gzip.compress, ".gz", bad=b"[1]"), r"sample 7 .*one object of JSON a line",
    ),
    Case(
        "jsonl-zst", json_lines(zstd, ".zst"), LINES, line_sample, NUM_SAMPLES,
        large_json_lines(zstd, ".zst"), FROM_THE_START,
        json_lines(lambda data: zstd(data)[:-9], ".zst"),
        r"jsonl\.zst: found bytes that do not decompress .* zstd file",
    ),
    Case(
        "megatron", megatron,
        {"tokens": Tokens("tokens", length=6), "document": Int("document")}, megatron_sample,
        NUM_SAMPLES, large_megatron, 0.55,
        truncated_megatron, r"\.idx: sequence 11 of 12: .* of the \.bin to 66, .*of 65 bytes",
    ),
]  # fmt: skip
