"""A study's samples in memory: images, decoded once, or sequences of bytes."""

from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dataio import DataioError, Field, Image, Int, Resize, open_source
from dataio.base.seeding import generator, key
from dataio.source.expand import expand
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.data import byte_windows


class LabelledImages(NamedTuple):
    """Images in memory.

    Attributes:
        images: uint8[num_samples, channels, height, width].
        labels: int64[num_samples].
        truth: int64[num_samples]: The right labels, where others are known to be wrong; else None.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    truth: NDArray[np.int64] | None = None


class LabelledText(NamedTuple):
    """Sequences of bytes in memory, and the file that each is from.

    Attributes:
        text: uint8[num_samples, sequence_length + 1].
        labels: int64[num_samples]: Numbers of files, in the order of their names.
    """

    text: NDArray[np.uint8]
    labels: NDArray[np.int64]


Samples = LabelledImages | LabelledText
"""What a study trains and tests on."""

Kind = TypeVar("Kind", bound=Samples)


def load_images(
    source: str, *, image: str, label: str, image_size: int, truth: str = ""
) -> LabelledImages:
    """Read and decode all samples of a source.

    Args:
        source: Pattern of shards.
        image: Field of the compressed image.
        label: Field of the class number.
        image_size: Height and width to resize to.
        truth: Field of the right class number; empty where there is none beside ``label``.

    Raises:
        ConfigError: If the source cannot be read, or lacks these fields.
    """
    fields: dict[str, Field] = {
        "image": Image(image, resize=Resize(image_size), decoded=True),
        "label": Int(label),
    }
    if truth:
        fields["truth"] = Int(truth)
    try:
        opened = open_source(source)
        blocks = list(opened.read(np.arange(opened.num_samples), fields))
    except DataioError as error:
        raise ConfigError(f"data: {error}") from error
    pixels = np.concatenate([rows.fixed[0] for rows in blocks])
    labels, *right = (
        np.concatenate([rows.fixed[field] for rows in blocks]).reshape(-1).view("<i8")
        for field in range(1, len(fields))
    )
    # uint8[num_samples, height, width, channels] -> channels first
    images = pixels.reshape(-1, image_size, image_size, 3).transpose(0, 3, 1, 2)
    return LabelledImages(np.ascontiguousarray(images), labels, *right)


def load_text(pattern: str, *, sequence_length: int, key: str) -> LabelledText:
    """Cut files into sequences; none lies in two of them.

    Args:
        pattern: Files, each a source of its own.
        sequence_length: Bytes that a model reads of a sample.
        key: What names the pattern in a study, for messages.

    Raises:
        ConfigError: If a file cannot be read, or is shorter than a sample.
    """
    try:
        paths = expand(pattern)
    except DataioError as error:
        raise ConfigError(f"{key}: {error}") from error
    parts = [byte_windows(Path(path), sequence_length, key=key) for path in paths]
    labels = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return LabelledText(np.concatenate(parts), labels)


def draw_subset(data: Kind, num_samples: int, *, seed: int) -> Kind:
    """Draw the samples of one seed, the same for every arm; 0 takes all of them."""
    return draw_subsets(data, num_samples, 0, seed=seed)[0]


def draw_subsets(
    data: Kind, num_samples: int, num_validation: int, *, seed: int
) -> tuple[Kind, Kind]:
    """Draw the samples of one seed, and others to validate on; 0 samples takes all that are left.

    Raises:
        ConfigError: If there are not so many, or none are left to train on.
    """
    count = len(data.labels)
    wanted = (num_samples or 1) + num_validation
    if wanted > count:
        asked = f"train_samples is {num_samples}"
        if num_validation:
            asked += f" and validation_samples {num_validation}"
        raise ConfigError(
            f"data: {asked}, but there are {count}; take fewer, or train_samples = 0 for all "
            "that are left"
        )
    order = generator(key(seed, "study subset")).permutation(count)
    split = num_samples or count - num_validation
    return take(data, order[:split]), take(data, order[split : split + num_validation])


def take(data: Kind, chosen: NDArray[np.int64]) -> Kind:
    """Take some samples, in their order."""
    rows = np.sort(chosen)
    parts = {name: part[rows] for name, part in data._asdict().items() if part is not None}
    taken: Kind = data._replace(**parts)  # type: ignore[assignment]
    return taken
