"""Data as it is found: wrong labels, duplicates, junk and rare classes, and all of it known.

What is made of a seed's samples follows from the seed and the settings, so that all arms of a seed
train on the same; a policy is told nothing of it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.base.seeding import generator, key
from tonari.ablate.study.data import LabelledImages, LabelledText, Samples, take
from tonari.trainer.errors import ConfigError

SHIFT_PIXELS, NOISE_LEVELS = 1, 4
"""How a near duplicate differs: moved by at most so many pixels, each value by so many of 255."""


class Found(NamedTuple):
    """Samples, and what is wrong with each.

    Attributes:
        data: The samples.
        is_wrong: bool[num_samples]: Its label is another class's, or it is junk.
        is_copy: bool[num_samples]: It is another of the samples, or nearly.
        kinds: bool[num_samples] each: The samples of a kind, where reports are to count them.
    """

    data: Samples
    is_wrong: NDArray[np.bool_]
    is_copy: NDArray[np.bool_]
    kinds: Mapping[str, NDArray[np.bool_]] = {}


def as_found(data: Samples) -> Found:
    """Take samples of which nothing is known to be wrong."""
    nothing = np.zeros(len(data.labels), np.bool_)
    return Found(data, nothing, nothing)


def corrupt(
    data: LabelledImages, *, num_classes: int, seed: int, noise: float = 0.0,
    duplicates: float = 0.0, junk: float = 0.0, imbalance: float = 1.0, repeats: float = 0.0,
    repeats_of: int = 20,
) -> Found:  # fmt: skip
    """Make samples worse, as settings of `DataConfig` say.

    Args:
        data: Of one seed; left as they are. Where they have a truth, samples with another label
            are wrong from the start.
        num_classes: Classes of the dataset.
        seed: Of the cell.
        noise: Share of all samples that get the label of another class, each as likely.
        duplicates: Share of all samples that are replaced by near copies of the others, with the
            labels of these.
        junk: Share of all samples whose image is noise, and whose label is any.
        imbalance: Samples of the first class for each of the last, >= 1; the classes between lie
            on a geometric series (Cui et al., Class-balanced loss, CVPR 2019, section 5). Less
            frequent classes lose samples.
        repeats: Share of all samples that are replaced by exact copies of ``repeats_of`` others,
            each as often, with their labels: what a crawler finds over and over again.
        repeats_of: Samples that are repeated so, or all others if these are fewer.

    Raises:
        ConfigError: If more is asked for than there are samples.
    """
    if noise + junk > 1:
        raise ConfigError(
            f"data.noise is {noise} and data.junk {junk}, together more than all samples; lower one"
        )
    rng = generator(key(seed, "study corruption"))
    data = _imbalanced(data, imbalance, num_classes, rng)
    images, labels = data.images.copy(), data.labels.copy()
    truth = labels.copy() if data.truth is None else data.truth.copy()
    count = len(labels)
    order = rng.permutation(count)
    num_near, num_copies = round(duplicates * count), round((duplicates + repeats) * count)
    if num_copies >= count:
        asked = f"data.duplicates is {duplicates}"
        if repeats:
            asked += f" and data.repeats {repeats}"
        raise ConfigError(
            f"{asked}, which leaves none of {count} samples to be copied; "
            "lower it, or raise data.train_samples"
        )
    near, copies, originals = order[:num_near], order[:num_copies], order[num_copies:]
    of = originals[np.arange(num_near) % len(originals)]
    images[near], labels[near], truth[near] = _nearly(images[of], rng), labels[of], truth[of]
    exact, repeated = order[num_near:num_copies], originals[:repeats_of]
    of = repeated[np.arange(len(exact)) % len(repeated)]
    images[exact], labels[exact], truth[exact] = images[of], labels[of], truth[of]
    # Of all samples, copies among them: as a crawler would have found them.
    order = rng.permutation(count)
    num_junk, num_noise = round(junk * count), round(noise * count)
    rubbish, mislabelled = order[:num_junk], order[num_junk : num_junk + num_noise]
    images[rubbish] = rng.integers(256, size=(num_junk, *images.shape[1:]), dtype=np.uint8)
    labels[rubbish] = rng.integers(num_classes, size=num_junk)
    steps = rng.integers(1, num_classes, len(mislabelled)) if num_classes > 1 else 0
    labels[mislabelled] = (labels[mislabelled] + steps) % num_classes
    is_wrong, is_copy = labels != truth, np.zeros(count, np.bool_)
    is_wrong[rubbish] = is_copy[copies] = True
    return Found(LabelledImages(images, labels), is_wrong, is_copy)


def spoil_text(data: LabelledText, *, seed: int, junk: float) -> Found:
    """Make a share of sequences junk: half of them shuffled, half of them random bytes.

    Args:
        data: Of one seed; left as they are.
        seed: Of the cell.
        junk: Share of all samples. Of these the first half, rounded down, keep their bytes in
            another order; the others get bytes from 0 to 255, each as likely.

    Returns:
        The samples; ``kinds`` are ``"text 0"`` and so on, by file, ``"shuffled"`` and ``"random"``.
    """
    rng = generator(key(seed, "study corruption"))
    text, count = data.text.copy(), len(data.labels)
    rubbish = rng.permutation(count)[: round(junk * count)]
    shuffled, random = np.split(rubbish, [len(rubbish) // 2])
    text[shuffled] = rng.permuted(text[shuffled], axis=1)
    text[random] = rng.integers(256, size=text[random].shape, dtype=np.uint8)
    rows = np.arange(count)
    is_wrong = np.isin(rows, rubbish)
    kinds = {
        f"text {label}": (data.labels == label) & ~is_wrong
        for label in np.unique(data.labels).tolist()
    }
    kinds |= {"shuffled": np.isin(rows, shuffled), "random": np.isin(rows, random)}
    return Found(LabelledText(text, data.labels), is_wrong, np.zeros(count, np.bool_), kinds)


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
    return take(data, np.concatenate(kept))


def _nearly(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Move each image a little, and change its values a little."""
    moved = images.astype(np.int64)
    shifts = rng.integers(-SHIFT_PIXELS, SHIFT_PIXELS + 1, (len(images), 2))
    for place, (down, right) in enumerate(shifts.tolist()):
        moved[place] = np.roll(moved[place], (down, right), axis=(1, 2))
    moved += rng.integers(-NOISE_LEVELS, NOISE_LEVELS + 1, moved.shape)
    return np.clip(moved, 0, 255).astype(np.uint8)
