"""A study of two arms with two seeds, on a few small images."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

STUDY = """
[study]
baseline = "plain"
seeds = 2
[train.data]
train = "train.parquet"
test = "test.parquet"
image = "png"
image_size = 8
batch_size = 8
workers.threads = 0
cache.path = "cache"
[train.model]
kind = "small_cnn"
num_classes = 4
[train.run]
epochs = 1
device = "cpu"
[arms.plain]
[arms."random, half"]
importance.kind = "random"
importance.fraction = 0.5
"""


def make_study(directory: Path, text: str = STUDY) -> Path:
    """Write the study beside its data."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 64), ("test", 32)):
        rows = []
        for number in range(count):
            file = io.BytesIO()
            pixels = rng.integers(60, size=(8, 8, 3)) + 60 * (number % 4)
            Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
            rows.append({"key": str(number), "png": file.getvalue(), "cls": number % 4,
                         "is_wrong": int(number % 8 == 0)})  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{name}.parquet")
    (directory / "study.toml").write_text(text)
    return directory / "study.toml"
