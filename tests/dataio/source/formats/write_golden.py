"""Write the files of tests/golden/records again, each by the library that people write it with.

``pip install mosaicml-streaming litdata tfrecord``, then ``python -m
tests.dataio.source.formats.write_golden``. Those libraries are too large to be a test dependency;
the files that are there were written by mosaicml-streaming 0.13.0, litdata 0.2.76 and tfrecord
1.14.6.
"""

import gzip
import shutil
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from tests.dataio.source.formats.record_samples import NUM_SAMPLES, pixels, sample

GOLDEN = Path(__file__).parents[3] / "golden" / "records"
MDS = {
    "text": "str", "raw": "bytes", "label": "int", "small": "uint8", "score": "float32",
    "fixed": "ndarray:float32:2,3", "vector": "ndarray:int32", "free": "ndarray", "png": "png",
    "picture": "pil", "meta": "json", "digits": "str_int",
}  # fmt: skip


def write_mds(directory: Path) -> None:
    from streaming import MDSWriter

    for name, compression in (("mds", None), ("mds_zstd", "zstd"), ("mds_gz", "gz")):
        out = str(directory / name)
        with MDSWriter(out=out, columns=MDS, compression=compression, size_limit=3500) as writer:
            for number in range(NUM_SAMPLES):
                values = sample(number) | {"picture": picture(number), "png": picture(number)}
                writer.write({key: values[key] for key in MDS})
    for name, compression in (("mds_hashes", None), ("mds_zstd_hashes", "zstd")):
        with MDSWriter(
            out=str(directory / name), columns={"text": "str"}, compression=compression,
            hashes=["sha1", "xxh64"], size_limit=300,
        ) as writer:  # fmt: skip
            for number in range(NUM_SAMPLES):
                writer.write({"text": f"text {number}"})
    with MDSWriter(out=str(directory / "mds_pickle"), columns={"a": "int", "b": "pkl"}) as writer:
        for number in range(3):
            writer.write({"a": number, "b": [number]})


def write_litdata(directory: Path) -> None:
    from litdata.streaming.writer import BinaryWriter

    for name, options in (
        ("litdata", {}),
        ("litdata_zstd", {"compression": "zstd", "compression_level": "chunk"}),
        ("litdata_frames", {"compression": "zstd"}),
    ):
        writer = BinaryWriter(str(directory / name), chunk_size=4, **options)
        for number in range(NUM_SAMPLES):
            values: dict[str, Any] = sample(number)
            values |= {"picture": picture(number), "meta": {"id": number, "name": f"n{number}"}}
            values |= {"jpeg": jpeg(number), "any": Fraction(number, 3)}
            del values["png"]
            writer[number] = values
        writer.done()
        writer.merge()


def write_tfrecord(directory: Path) -> None:
    from tfrecord import TFRecordWriter

    path = directory / "train.tfrecord-00000-of-00001"
    writer = TFRecordWriter(str(path))
    for number in range(NUM_SAMPLES):
        values = sample(number)
        writer.write(
            {
                "text": (values["text"].encode(), "byte"),
                "raw": (values["raw"], "byte"),
                "label": (values["label"], "int"),
                "signed": (-1 - number, "int"),
                "score": (float(values["score"]), "float"),
                "fixed": (values["fixed"].ravel().tolist(), "float"),
                "vector": (values["vector"].tolist(), "int"),
            }
        )
    writer.close()
    # A reproducible time in the header.
    (directory / "train.tfrecord.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def picture(number: int) -> Image.Image:
    return Image.fromarray(pixels(number))


def jpeg(number: int) -> Image.Image:
    file = BytesIO()
    picture(number).save(file, "JPEG")
    return Image.open(file)


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir(parents=True)
    write_mds(GOLDEN)
    write_litdata(GOLDEN)
    write_tfrecord(GOLDEN)
