r"""Put the labels that people gave CIFAR-10 beside the right ones: CIFAR-10N, as a Parquet file.

    python -m examples.cifar10n CIFAR-10_human.pt data/cifar10-train.parquet data/cifar10n.parquet
    python -m examples.damaged data/cifar10n.parquet "runs/damaged/people-{seed}.parquet" \
        --truth true_cls --samples 4000 --size 16 --seeds 0:12
    tonari ablate examples/selection_study.toml --out runs/people \
        "data.train=runs/damaged/people-{seed}.parquet"

Takes the label file of the authors (Wei et al., Learning with Noisy Labels Revisited, ICLR 2022;
http://noisylabels.com), which is not part of this repository: its licence, CC BY-NC 4.0, allows no
commercial use. Its arrays clean_label, aggre_label, worse_label and random_label1 to random_label3
have a number for each training image, in the order of the batches in which CIFAR-10 is published.
What is written has all columns of the Parquet file, the labels asked for in place of the right
ones, these as true_cls, is_wrong (0 or 1), and all that people said under the authors' names.

The Parquet file must be in that order, which is checked against clean_label. One in another order,
such as a class after the other, needs the images as published to be told apart: the binary version
(https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz), unpacked, as --originals DIRECTORY. Each
image is then found by its pixels, JPEG or not. No file is read that could run code.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from dataio import DataioError
from examples.damaged import load_images

CLEAN = "clean_label"
HUMAN = ("aggre_label", "worse_label", "random_label1", "random_label2", "random_label3")
NUM_CLASSES = 10
SIDE, BLOCK = 32, 4
MOST_DIFFERENCE = 12.0
"""Levels of 255 by which an image's blocks may differ from those published, on average."""

_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
NUMPY_PARTS: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    # By the names that files of older and newer versions of NumPy hold
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
    np.ndarray, np.dtype, np.dtypes.Int64DType, np.dtypes.Int32DType, np.dtypes.UInt8DType,
]  # fmt: skip
"""All that the labels' file may make besides plain values: arrays of whole numbers."""


def main() -> None:
    given = parse_arguments()
    try:
        labels = read_labels(given.labels)
        write(given.parquet, given.out, labels, given)
    except (ValueError, OSError, DataioError) as error:
        sys.exit(f"cifar10n: {error}")


def read_labels(path: Path) -> dict[str, NDArray[np.int64]]:
    """Read the labels of one kind after the other: int64[num_samples] each.

    Raises:
        ValueError: If the file needs code to be run, or lacks labels.
    """
    cure = "give CIFAR-10_human.pt as the authors publish it, or its arrays as .npz"
    try:
        if path.suffix in (".npz", ".npy"):
            found = np.load(path, allow_pickle=False)
        else:
            with torch.serialization.safe_globals(NUMPY_PARTS):
                found = torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of torch, NumPy or zipfile: there is no one class of them
        # What torch says advises to let the file run its code
        kind = type(error).__name__
        raise ValueError(f"{path}: cannot be read without running code ({kind}); {cure}") from error
    if not isinstance(found, Mapping) or not {CLEAN, *HUMAN} <= set(found):
        raise ValueError(f"{path}: expected the arrays {', '.join((CLEAN, *HUMAN))}; {cure}")
    labels = {name: np.asarray(found[name]) for name in (CLEAN, *HUMAN)}
    for name, values in labels.items():
        is_whole = values.dtype.kind in "iu" and values.shape == labels[CLEAN].shape == (
            values.size,
        )
        if not is_whole or not values.size or values.min() < 0 or values.max() >= NUM_CLASSES:
            raise ValueError(
                f"{path}: {name} is {values.dtype}{list(values.shape)}, expected as many whole "
                f"numbers from 0 to {NUM_CLASSES - 1} as {CLEAN} has; {cure}"
            )
    return {name: values.astype(np.int64) for name, values in labels.items()}


def write(
    source: Path, out: Path, labels: Mapping[str, NDArray[np.int64]], given: argparse.Namespace
) -> None:
    """Write the Parquet file.

    Raises:
        ValueError: If it is not known which image a label is of.
    """
    table = pq.read_table(source)
    if given.label not in table.column_names:
        raise ValueError(
            f"{source}: there is no column {given.label!r}, expected one of "
            f"{', '.join(table.column_names)}; name the class's with --label"
        )
    classes = table.column(given.label).to_numpy()
    if len(classes) != len(labels[CLEAN]):
        raise ValueError(
            f"{source}: {len(classes):,} rows for {len(labels[CLEAN]):,} labels, expected as many; "
            "give the training images, all of them"
        )
    order = np.arange(len(classes))
    if given.originals is not None:
        images = load_images(str(source), image=given.image, label=given.label, size=SIDE).images
        order = find_images(images.transpose(0, 3, 1, 2), classes, given.originals, labels[CLEAN])
    if np.any(classes != labels[CLEAN][order]):
        differ = int((classes != labels[CLEAN][order]).sum())
        raise ValueError(
            f"{source}: {differ:,} of {len(classes):,} classes are not those of {CLEAN}, so the "
            "rows are not in the order of the labels, expected that of CIFAR-10's batches; give "
            "--originals, the directory of the binary version, and rows are matched by their images"
        )
    mine = {name: values[order].astype(np.int32) for name, values in labels.items()}
    place = table.schema.get_field_index(given.label)
    table = table.set_column(place, given.label, pa.array(mine[given.kind]))
    added = {
        "true_cls": mine[CLEAN],
        "is_wrong": (mine[given.kind] != mine[CLEAN]).astype(np.int32),
    }
    for name, values in {**added, **{name: mine[name] for name in HUMAN}}.items():
        table = table.append_column(name, pa.array(values))
    pq.write_table(table, out, row_group_size=4096)
    print(f"{out}: {given.kind}, {added['is_wrong'].mean():.1%} of {len(classes):,} labels wrong")


def find_images(
    images: NDArray[np.uint8], classes: NDArray[np.generic], originals: Path,
    clean: NDArray[np.int64],
) -> NDArray[np.int64]:  # fmt: skip
    """Find which published image each one is.

    Args:
        images: uint8[num_samples, channels, height, width].
        classes: Their right classes, as all are looked for among those of their class.
        originals: Directory with data_batch_1.bin and so on.
        clean: int64[num_samples]: The right classes in the order published.

    Returns:
        int64[num_samples]: A place in that order for each image, each once.

    Raises:
        ValueError: If the batches are others, or an image is none of them.
    """
    paths = sorted(originals.glob("data_batch_*.bin"))
    if not paths:
        raise ValueError(f"{originals}: holds no data_batch_1.bin; unpack the binary version there")
    # uint8[num_samples, 1 + channels * height * width]
    records = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    records = records.reshape(-1, 1 + 3 * SIDE * SIDE)
    if not np.array_equal(records[:, 0], clean):
        raise ValueError(
            f"{originals}: its {len(records):,} labels are not those of {CLEAN}; give "
            "data_batch_1.bin to data_batch_5.bin of cifar-10-binary.tar.gz, and no others"
        )
    mine, published = _blocks(images), _blocks(records[:, 1:].reshape(-1, 3, SIDE, SIDE))
    order = np.empty(len(images), np.int64)
    for label in range(NUM_CLASSES):
        rows, places = np.flatnonzero(classes == label), np.flatnonzero(clean == label)
        # float32[rows, places]: squared distances, but for what is the same in a row
        far = (published[places] ** 2).sum(axis=1) - 2 * mine[rows] @ published[places].T
        order[rows] = places[far.argmin(axis=1)] if len(places) else -1
    differ = np.abs(mine - published[order]).mean(axis=1)
    if len(np.unique(order)) < len(order) or np.any(differ > MOST_DIFFERENCE):
        raise ValueError(
            f"{int((differ > MOST_DIFFERENCE).sum()):,} images are like none in {originals}, and "
            f"{len(order) - len(np.unique(order)):,} like one that another is like; expected the "
            "training images of CIFAR-10 at 32x32, each once"
        )
    return order


def _blocks(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """float32[num_samples, blocks]: Means of squares of pixels, which JPEG hardly changes."""
    part = SIDE // BLOCK
    cut = images.reshape(len(images), 3, part, BLOCK, part, BLOCK)
    means: NDArray[np.float32] = cut.mean(axis=(3, 5), dtype=np.float32)
    return means.reshape(len(images), -1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("labels", type=Path, help="CIFAR-10_human.pt")
    parser.add_argument("parquet", type=Path, help="the training images of CIFAR-10")
    parser.add_argument("out", type=Path, help="what to write")
    parser.add_argument(
        "--kind", choices=HUMAN, default="worse_label", help="the labels to train on"
    )
    parser.add_argument("--image", default="jpg", help="column of the image")
    parser.add_argument("--label", default="cls", help="column of the right class")
    parser.add_argument("--originals", type=Path, help="directory of the binary version's batches")
    return parser.parse_args()


if __name__ == "__main__":
    main()
