r"""Make images worse, as data is found: wrong labels, near duplicates, junk, rare classes.

    python -m examples.damaged data/cifar10-train.parquet "runs/damaged/noise40-{seed}.parquet" \
        --samples 4000 --size 16 --noise 0.4 --seeds 0:12

Writes a Parquet file for each seed, with the samples that are drawn for it: the columns key, png
and cls, and for studies is_wrong (1: the label is another class's, or the image is junk) and
is_copy. What is written follows from the seed and the options alone. A study names the files with
{seed}, and trains all its arms of one seed on the same. --sort writes a class after the other, so
that a node's part of the data is of few classes; without, they are mixed.

Damage is counted in shares of all samples:
  --noise       the label of another class, each as likely; --pairs: one other, class 2k <-> 2k + 1
  --duplicates  near copies of other samples, moved by a pixel and a little changed
  --repeats     exact copies of --repeats-of others, each as often
  --junk        images of noise with any label
  --imbalance N samples of the first class for each of the last, the classes between on a geometric
                series (Cui et al., Class-balanced loss, CVPR 2019, section 5)

--truth names a field of the right classes where the labels may be wrong already. --validation N
writes N other samples beside, as NAME-validation.parquet, their labels as noisy: to choose lengths
and knobs by, before the test images are looked at.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image as Picture

from dataio import DataioError, Field, Image, Int, Resize, open_source
from dataio.base.seeding import generator, key

SHIFT_PIXELS, NOISE_LEVELS = 1, 4
"""How a near duplicate differs: moved by at most so many pixels, each value by so many of 255."""


@dataclass(frozen=True)
class LabelledImages:
    """Images in memory.

    Attributes:
        images: uint8[num_samples, height, width, 3].
        labels: int64[num_samples].
        truth: int64[num_samples]: The right labels; those given, where nothing else is known.
        is_copy: bool[num_samples]: It is another of the samples, or nearly.
        is_junk: bool[num_samples].
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    truth: NDArray[np.int64]
    is_copy: NDArray[np.bool_]
    is_junk: NDArray[np.bool_]

    def take(self, chosen: NDArray[np.int64]) -> "LabelledImages":
        """Take some samples, in this order."""
        return LabelledImages(*(values[chosen] for values in vars(self).values()))

    @property
    def is_wrong(self) -> NDArray[np.bool_]:
        """bool[num_samples]: The label is another class's, or the image is junk."""
        wrong: NDArray[np.bool_] = (self.labels != self.truth) | self.is_junk
        return wrong


def load_images(
    source: str, *, image: str, label: str, size: int, truth: str = ""
) -> LabelledImages:
    """Read and decode all samples of a source.

    Args:
        source: Pattern of shards.
        image: Field of the compressed image.
        label: Field of the class number.
        size: Height and width to resize to.
        truth: Field of the right class number; empty where there is none beside ``label``.

    Raises:
        DataioError: If the source cannot be read, or lacks these fields.
    """
    fields: dict[str, Field] = {
        "image": Image(image, resize=Resize(size), decoded=True),
        "label": Int(label),
        "truth": Int(truth or label),
    }
    opened = open_source(source)
    blocks = list(opened.read(np.arange(opened.num_samples), fields))
    pixels = np.concatenate([rows.fixed[0] for rows in blocks]).reshape(-1, size, size, 3)
    labels, right = (
        np.concatenate([rows.fixed[field] for rows in blocks]).reshape(-1).view("<i8")
        for field in (1, 2)
    )
    nothing = np.zeros(len(labels), np.bool_)
    return LabelledImages(pixels, labels, right, nothing, nothing)


def draw(
    data: LabelledImages, num_samples: int, num_validation: int, *, seed: int
) -> tuple[LabelledImages, LabelledImages]:
    """Draw the samples of one seed, and others to validate on; 0 samples takes all that are left.

    Raises:
        ValueError: If there are not so many.
    """
    count = len(data.labels)
    if (num_samples or 1) + num_validation > count:
        raise ValueError(
            f"--samples {num_samples} and --validation {num_validation}, but there are {count}; "
            "take fewer"
        )
    order = generator(key(seed, "study subset")).permutation(count)
    split = num_samples or count - num_validation
    drawn, validation = order[:split], order[split : split + num_validation]
    return data.take(np.sort(drawn)), data.take(np.sort(validation))


def damage(
    data: LabelledImages, *, num_classes: int, seed: int, noise: float = 0.0, pairs: float = 0.0,
    duplicates: float = 0.0, junk: float = 0.0, imbalance: float = 1.0, repeats: float = 0.0,
    repeats_of: int = 20,
) -> LabelledImages:  # fmt: skip
    """Make samples worse; see the top of this file.

    Args:
        data: Of one seed; left as they are.
        num_classes: Classes of the dataset.
        seed: Of what is drawn.
        noise: Share of all samples that get the label of another class, each as likely.
        pairs: Share that get the label of the class that theirs is a pair with.
        duplicates: Share that are replaced by near copies of the others, with their labels.
        junk: Share whose image is noise, and whose label is any.
        imbalance: Samples of the first class for each of the last, >= 1.
        repeats: Share that are replaced by exact copies of ``repeats_of`` others.
        repeats_of: Samples that are repeated so, or all others if these are fewer.

    Raises:
        ValueError: If more is asked for than there are samples.
    """
    if noise + pairs + junk > 1:
        raise ValueError(
            f"--noise {noise}, --pairs {pairs} and --junk {junk} are more than all samples; lower "
            "one"
        )
    rng = generator(key(seed, "study corruption"))
    data = _imbalanced(data, imbalance, num_classes, rng)
    images, labels, truth = data.images.copy(), data.labels.copy(), data.truth.copy()
    count = len(labels)
    order = rng.permutation(count)
    num_near, num_copies = round(duplicates * count), round((duplicates + repeats) * count)
    if num_copies >= count:
        raise ValueError(
            f"--duplicates {duplicates} and --repeats {repeats} leave none of {count} samples to "
            "be copied; lower one, or raise --samples"
        )
    near, exact, originals = np.split(order, [num_near, num_copies])
    of = originals[np.arange(num_near) % len(originals)]
    images[near], labels[near], truth[near] = _nearly(images[of], rng), labels[of], truth[of]
    repeated = originals[:repeats_of]
    of = repeated[np.arange(len(exact)) % len(repeated)]
    images[exact], labels[exact], truth[exact] = images[of], labels[of], truth[of]
    # Of all samples, copies among them: as a crawler would have found them.
    order = rng.permutation(count)
    ends = np.cumsum([round(share * count) for share in (junk, noise, pairs)])
    rubbish, mislabelled, paired, _ = np.split(order, ends)
    images[rubbish] = rng.integers(256, size=images[rubbish].shape, dtype=np.uint8)
    labels[rubbish] = rng.integers(num_classes, size=len(rubbish))
    steps = rng.integers(1, num_classes, len(mislabelled)) if num_classes > 1 else 0
    labels[mislabelled] = (labels[mislabelled] + steps) % num_classes
    labels[paired] ^= 1
    is_copy, is_junk = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    is_copy[near] = is_copy[exact] = is_junk[rubbish] = True
    return LabelledImages(images, labels, truth, is_copy, is_junk)


def _imbalanced(
    data: LabelledImages, imbalance: float, num_classes: int, rng: np.random.Generator
) -> LabelledImages:
    if imbalance == 1:
        return data
    shares = imbalance ** -(np.arange(num_classes) / max(num_classes - 1, 1))
    kept = []
    for label, share in enumerate(shares.tolist()):
        rows = np.flatnonzero(data.labels == label)
        most = max(round(share * len(rows)), min(len(rows), 1))
        kept.append(rng.permutation(rows)[:most])
    return data.take(np.sort(np.concatenate(kept)))


def _order(data: LabelledImages, *, seed: int, by_class: bool) -> NDArray[np.int64]:
    mixed = generator(key(seed, "study partition")).permutation(len(data.labels))
    # Within a class the order is random too, whatever order the file had.
    return mixed[np.argsort(data.labels[mixed], kind="stable")] if by_class else mixed


def _nearly(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Move each image a little, and change its values a little."""
    moved = images.astype(np.int64)
    shifts = rng.integers(-SHIFT_PIXELS, SHIFT_PIXELS + 1, (len(images), 2))
    for place, (down, right) in enumerate(shifts.tolist()):
        moved[place] = np.roll(moved[place], (down, right), axis=(0, 1))
    moved += rng.integers(-NOISE_LEVELS, NOISE_LEVELS + 1, moved.shape)
    return np.clip(moved, 0, 255).astype(np.uint8)


def write(path: Path, data: LabelledImages) -> None:
    """Write samples as a Parquet file, images as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "key": [f"{number:07}" for number in range(len(data.labels))],
        "png": [_png(image) for image in data.images],
        "cls": data.labels,
        "is_wrong": data.is_wrong.astype(np.int64),
        "is_copy": data.is_copy.astype(np.int64),
    }
    pq.write_table(pa.table(columns), path)


def _png(image: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Picture.fromarray(image).save(file, "PNG")
    return file.getvalue()


def main(argv: Sequence[str] | None = None) -> None:
    """Write the files of all seeds."""
    given = _parser().parse_args(argv)
    low, _, high = given.seeds.partition(":")
    try:
        data = load_images(
            given.source, image=given.image, label=given.label, size=given.size, truth=given.truth
        )
        shares = {name: getattr(given, name) for name in SHARES}
        num_classes = int(max(data.labels.max(), data.truth.max())) + 1
        for seed in range(int(low), int(high or int(low) + 1)):
            drawn, validation = draw(data, given.samples, given.validation, seed=seed)
            path = Path(given.out.replace("{seed}", str(seed)))
            worse = damage(
                drawn, num_classes=num_classes, seed=seed, repeats_of=given.repeats_of, **shares
            )
            write(path, worse.take(_order(worse, seed=seed, by_class=given.sort)))
            if given.validation:
                noisy = {name: shares[name] for name in ("noise", "pairs")}
                other = damage(validation, num_classes=num_classes, seed=seed, **noisy)
                write(path.with_stem(f"{path.stem}-validation"), other)
            print(f"{path}: {len(worse.labels)} samples, {int(worse.is_wrong.sum())} wrong")
    except (ValueError, DataioError) as error:
        sys.exit(f"damaged: {error}")


SHARES = ("noise", "pairs", "duplicates", "junk", "repeats", "imbalance")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.damaged", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("source", help="shards of images, such as data/cifar10-train.parquet")
    parser.add_argument("out", help="what to write, {seed} in its name")
    parser.add_argument("--seeds", default="0", metavar="A:B", help="from A up to and without B")
    parser.add_argument("--samples", type=int, default=0, help="drawn for each seed; 0: all")
    parser.add_argument("--validation", type=int, default=0, metavar="N")
    parser.add_argument("--size", type=int, default=32, help="height and width to resize to")
    parser.add_argument("--image", default="jpg", help="field of the image (default: jpg)")
    parser.add_argument("--label", default="cls", help="field of the class (default: cls)")
    parser.add_argument("--truth", default="", help="field of the right class")
    parser.add_argument("--sort", action="store_true", help="write a class after the other")
    parser.add_argument("--repeats-of", type=int, default=20)
    for name in SHARES:
        parser.add_argument(f"--{name}", type=float, default=float(name == "imbalance"))
    return parser


if __name__ == "__main__":
    main()
