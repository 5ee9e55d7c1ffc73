"""Write a small generated dataset for the examples: pictures of one disc each, in tar shards.

    python examples/pictures.py pictures

makes ``pictures/train-{000000..000001}.tar`` and ``pictures/val/val-000000.tar``. A sample holds
the picture (jpg), the number of its disc's colour (cls), and the mask (png, indexed): 0 beside the
disc, else that number and 1.
"""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from tonari.pack.shards import Sample, write_shards

NUM_TRAIN, NUM_VAL = 192, 64
COLOURS = ((220, 40, 40), (40, 220, 40), (40, 40, 220), (220, 220, 40))


def write_pictures(directory: Path) -> None:
    """Write training and validation shards; a directory that is there is refused."""
    write_shards(samples(NUM_TRAIN, seed=0), directory, shard_samples=NUM_TRAIN // 2)
    write_shards(samples(NUM_VAL, seed=1), directory / "val", prefix="val", shard_samples=NUM_VAL)


def samples(count: int, *, seed: int) -> Iterator[Sample]:
    rng = np.random.default_rng(seed)
    for number in range(count):
        label = number % len(COLOURS)
        width, height = rng.integers(240, 360, 2).tolist()
        clouds = rng.integers(60, 180, (8, 8, 3)).astype(np.uint8)
        picture, mask = (
            Image.fromarray(clouds).resize((width, height)),
            Image.new("P", (width, height)),
        )
        mask.putpalette([0, 0, 0, *(value for colour in COLOURS for value in colour)])
        radius = int(rng.integers(60, 110))
        x, y = (np.array([width, height]) / 2 + rng.uniform(-40, 40, 2)).tolist()
        for image, fill in ((picture, COLOURS[label]), (mask, label + 1)):
            ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill)
        yield {
            "__key__": f"{number:06d}",
            "jpg": encoded(picture, "JPEG"), "png": encoded(mask, "PNG"),
            "cls": str(label).encode(),
        }  # fmt: skip


def encoded(picture: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


if __name__ == "__main__":
    write_pictures(Path(sys.argv[1]))
