"""Real images for the demo, packed as WebDataset shards, a test part held out."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from dataio import Bytes, FieldError, Int, Source, open_source
from dataio.base.seeding import generator, key
from dataio.rows.decode import image_shape
from tonari.pack.shards import write_shards

TEST_FRACTION = 0.2
SHARD_SAMPLES = 100
IMAGE_EXTENSIONS = ("jpg", "png", "jpeg", "webp")


@dataclass(frozen=True)
class PackedImages:
    """A dataset in shards.

    Attributes:
        directory: Stands for the shared filesystem.
        train_shards: Paths, in order.
        test_shards: Paths, in order.
        num_train: Samples to train on.
        num_test: Samples to test on.
        extension: Of the images in the tars.
        image_shape: Height, width, channels.
        num_classes: One more than the largest label.
        tar_bytes: Of all shards.
        wrong: Sample ids of the training samples whose label is another class's.
    """

    directory: Path
    train_shards: list[str]
    test_shards: list[str]
    num_train: int
    num_test: int
    extension: str
    image_shape: tuple[int, int, int]
    num_classes: int
    tar_bytes: int
    wrong: list[int]


def pack_digits(directory: Path, *, wrong_labels: float) -> PackedImages:
    """Pack scikit-learn's 1,797 handwritten digits, 8 x 8 grey, as PNG; see `pack_source`."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = (digits.images * (255 / 16)).astype(np.uint8)
    images = [_png(image) for image in pixels]
    labels = digits.target.astype(np.int64)
    return _pack(directory, images, labels, wrong_labels, extension="png", channels=1)


def pack_source(
    spec: str, directory: Path, *, max_samples: int, wrong_labels: float
) -> PackedImages:
    """Pack images and labels (``cls``) of any supported source.

    Args:
        spec: Tar pattern or Parquet.
        directory: Where the shards go.
        max_samples: Take this many, at random; 0 takes all.
        wrong_labels: Fraction of the training labels that become another class's, at random.

    Raises:
        SourceError: If the source cannot be read or has none of the known image fields.
    """
    source = open_source(spec)
    num_samples = min(max_samples or source.num_samples, source.num_samples)
    # At random, because sources are often sorted by class.
    rng = generator(key(0, "demo samples"))
    ids = np.sort(rng.choice(source.num_samples, num_samples, replace=False))
    extension = _image_extension(source)
    images: list[bytes] = []
    labels: list[NDArray[np.int64]] = []
    for rows in source.read(ids, {"image": Bytes(extension), "label": Int("cls")}):
        ends = np.cumsum(rows.lengths[:, 0]).tolist()
        starts = [0, *ends[:-1]]
        images += [rows.variable[0][a:b].tobytes() for a, b in zip(starts, ends, strict=True)]
        labels.append(rows.fixed[0].view(np.int64)[:, 0])
    found = np.concatenate(labels)
    return _pack(directory, images, found, wrong_labels, extension=extension, channels=3)


def _image_extension(source: Source) -> str:
    """Find the field that holds images, by trying the first sample."""
    refused = ""
    for extension in IMAGE_EXTENSIONS:
        try:
            next(iter(source.read(np.zeros(1, np.int64), {"image": Bytes(extension)})))
        except FieldError as error:
            refused = str(error)
        else:
            return extension
    raise FieldError(f"{refused}; the demo looks for images named {', '.join(IMAGE_EXTENSIONS)}")


def _pack(
    directory: Path,
    images: Sequence[bytes],
    labels: NDArray[np.int64],
    wrong_labels: float,
    *,
    extension: str,
    channels: int,
) -> PackedImages:
    order = generator(key(0, "demo split")).permutation(len(images))
    num_test = int(len(images) * TEST_FRACTION)
    num_train, num_classes = len(images) - num_test, int(labels.max()) + 1
    rng = generator(key(0, "demo labels"))
    wrong = rng.choice(num_train, round(wrong_labels * num_train), replace=False)
    labels = labels.copy()
    labels[order[num_test:][wrong]] += rng.integers(1, max(num_classes, 2), len(wrong))
    labels %= num_classes

    def samples(numbers: NDArray[np.int64]) -> Iterator[Mapping[str, str | bytes]]:
        for number in numbers.tolist():
            yield {
                "__key__": f"{number:06d}",
                extension: images[number],
                "cls": str(labels[number]).encode(),
            }

    def write(name: str, numbers: NDArray[np.int64]) -> list[str]:
        paths = write_shards(
            samples(numbers), directory / name, prefix=name, shard_samples=SHARD_SAMPLES
        )
        return [str(path) for path in paths]

    height, width = image_shape(np.frombuffer(images[0], np.uint8))
    train, test = write("train", order[num_test:]), write("test", order[:num_test])
    return PackedImages(
        directory,
        train,
        test,
        num_train,
        num_test,
        extension,
        (height, width, channels),
        num_classes,
        tar_bytes=sum(Path(path).stat().st_size for path in train + test),
        wrong=wrong.tolist(),
    )


def _png(image: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    PillowImage.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()
