"""A tiny dataset that a small CNN learns: dim images of one class, bright ones of the other."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dataio.base.seeding import generator, key

CONFIG = """
[data]
train = "{train}"
test = "{test}"
image = "png"
channels = 1
batch_size = 16
workers.threads = 0
[model]
num_classes = 2
image_size = 8
[shuffle]
exchange = 0.3
[optimizer]
lr = 0.05
[run]
epochs = 3
log_steps = 1
directory = "{runs}"
device = "cpu"
"""


def write_config(directory: Path, *, num_samples: int = 100) -> Path:
    """Write the data and a configuration; returns the configuration's path."""
    train, test = directory / "train.parquet", directory / "test.parquet"
    for path, samples in ((train, num_samples), (test, num_samples // 3)):
        _write_parquet(path, samples)
    config = directory / "run.toml"
    config.write_text(CONFIG.format(train=train, test=test, runs=directory / "runs"))
    return config


def write_shard(path: Path, *, num_samples: int = 100) -> None:
    """Write the same samples as a tar shard."""
    with tarfile.open(path, "w") as shard:
        for number, (image, label) in enumerate(zip(*_samples(num_samples), strict=True)):
            for extension, data in (("png", image), ("cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{number:06d}.{extension}")
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))


def _write_parquet(path: Path, num_samples: int) -> None:
    images, labels = _samples(num_samples)
    pq.write_table(pa.table({"png": images, "cls": labels}), path)


def _samples(num_samples: int) -> tuple[list[bytes], list[int]]:
    rng = generator(key(num_samples, "digits"))
    labels = np.arange(num_samples) % 2
    pixels = rng.integers(0, 100, (num_samples, 8, 8)) + 60 * labels[:, None, None]
    return [_png(image) for image in pixels.astype(np.uint8)], labels.tolist()


def _png(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
