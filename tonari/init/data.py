"""What a dataset holds, as far as a first config has to know it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataio import Image, Int
from dataio.rows.decode import image_shape
from dataio.source import open_some
from dataio.source.classes import class_names
from dataio.source.names import IMAGE_KEYS, LABEL_KEYS, fields_there, read_field

NUM_SHARDS, NUM_PICTURES = 16, 64
"""That are looked into at most, spread over all."""
SPLITS = ("val", "validation", "test")


@dataclass(frozen=True)
class Found:
    """What is written of a dataset.

    Attributes:
        image: Key of the pictures.
        label: Key of the classes.
        num_classes: By their names, or one more than the largest number that was seen.
        size: Pixels of a side that suit the pictures.
        is_exact: Whether all pictures have that size already.
    """

    image: str
    label: str
    num_classes: int
    size: int
    is_exact: bool


def look_into(data: str, *, image: str, label: str) -> Found:
    """Look into some shards; a key that is empty is found.

    Raises:
        DataioError: If they cannot be read, or have no picture, or no class.
    """
    source = open_some(data, num_shards=NUM_SHARDS)
    picture = next(fields_there(source, [image] if image else IMAGE_KEYS, (Image,), "image"))
    target = next(fields_there(source, [label] if label else LABEL_KEYS, (Int,), "label"))
    names = class_names(source, target.key)
    if names is None:
        labels = read_field(source, np.arange(source.num_samples), target)
    ids = np.unique(np.linspace(0, source.num_samples - 1, NUM_PICTURES).astype(np.int64))
    shapes = {image_shape(memoryview(its)) for its in read_field(source, ids, picture).tolist()}
    side = int(np.median([min(shape) for shape in shapes]))
    is_exact = shapes == {(side, side)} and side <= 64
    size = side if is_exact else 32 if side < 48 else 64 if side < 112 else 224
    num_classes = len(names) if names is not None else int(labels.max()) + 1
    return Found(picture.key, target.key, num_classes, size, is_exact)


def find_test(data: str) -> str:
    """Find what lies beside the training data under the name of a test split; "": nothing."""
    path = Path(data)
    for split in SPLITS:
        name = path.name.replace("train", split)
        if name != path.name and any(path.parent.glob(name)):
            return str(path.with_name(name))
    return ""
