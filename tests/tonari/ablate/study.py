"""A study of two arms with two seeds, on a few small images."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

STUDY = """
[study]
baseline = "global"
seeds = 2
[data]
train = "train.parquet"
test = "test.parquet"
image = "png"
image_size = 8
num_classes = 4
train_samples = 40
[settings]
shuffle = "global"
replicas = 4
batch_size = 4
epochs = 1
width = 4
[arms.global]
[arms."local, sorted"]
shuffle = "local"
"""


def make_study(directory: Path) -> Path:
    """Write the study beside its data."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 60), ("test", 30)):
        rows = []
        for number in range(count):
            file = io.BytesIO()
            pixels = rng.integers(60, size=(8, 8, 3)) + 60 * (number % 4)
            Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
            rows.append({"key": str(number), "png": file.getvalue(), "cls": number % 4})
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{name}.parquet")
    (directory / "study.toml").write_text(STUDY)
    return directory / "study.toml"
