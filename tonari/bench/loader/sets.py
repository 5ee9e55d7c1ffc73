"""The sets that loaders are measured on, generated from a seed. Needs NumPy; simplejpeg for images.

On disk a set is as neutral as can be: payloads back to back, offsets, labels. Every sample proves
where it came from: one of fixed size begins with its id, an image has a corner, a photo as a whole,
as bright as its label says.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

NUM_CLASSES = 100
IMAGE_SIDE = 256
CORNER = 16
JPEG_QUALITY = 90
CROP = 224
PHOTO_QUALITY = 95
PHOTO_GRAIN = 9.0

SetKind = Literal["fixed", "jpeg", "recipe"]
BLOCK_BYTES = 1 << 26
DIVISIBLE_BY = 64
"""Of the number of samples: no loader then has to lose or repeat any to come out even."""


@dataclass(frozen=True, kw_only=True)
class SampleSet:
    """What a set holds.

    Attributes:
        name: On the command line and in reports.
        num_samples: A multiple of DIVISIBLE_BY.
        sample_bytes: Of every sample; 0 for JPEG images.
        photo: Mean width and height of photos of many sizes, delivered by the recipe of ImageNet:
            a random crop, resized to CROP, and a flip. None: images of IMAGE_SIDE, whole.
        batch_size: Samples a batch and rank.
        seed: Of the content.
    """

    name: str
    num_samples: int
    sample_bytes: int
    photo: tuple[int, int] | None = None
    batch_size: int = 256
    seed: int = 0

    @property
    def kind(self) -> SetKind:
        """What must be done to a sample: nothing, decode it, or decode and crop it."""
        if self.photo is not None:
            return "recipe"
        return "jpeg" if self.is_jpeg else "fixed"

    @property
    def is_jpeg(self) -> bool:
        return self.sample_bytes == 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a decoded sample, uint8."""
        side = IMAGE_SIDE if self.photo is None else CROP
        return (side, side, 3) if self.is_jpeg else (self.sample_bytes,)

    def scaled(self, scale: float) -> "SampleSet":
        """Shrink the number of samples; a batch is never more than an eighth of them."""
        wanted = round(self.num_samples * scale / DIVISIBLE_BY) * DIVISIBLE_BY
        num_samples = max(wanted, DIVISIBLE_BY)
        batch_size = min(self.batch_size, num_samples // 8)
        return replace(self, num_samples=num_samples, batch_size=batch_size)

    def doubled(self) -> "SampleSet":
        """Twice the samples, for two nodes that hold as many each as one holds alone."""
        return replace(self, name=f"{self.name}-double", num_samples=2 * self.num_samples)


SETS = {
    spec.name: spec
    for spec in (
        SampleSet(name="1k", num_samples=200_000, sample_bytes=1 << 10),
        SampleSet(name="3k", num_samples=50_048, sample_bytes=3 << 10),
        SampleSet(name="jpeg", num_samples=20_032, sample_bytes=0),
        SampleSet(
            name="imagenet", num_samples=2048, sample_bytes=0, photo=(500, 400), batch_size=128
        ),
        SampleSet(
            name="photos", num_samples=128, sample_bytes=0, photo=(3000, 2000), batch_size=16
        ),
        SampleSet(name="48k", num_samples=20_032, sample_bytes=48 << 10),
        SampleSet(name="8m", num_samples=64, sample_bytes=8 << 20, batch_size=4),
    )
}


@dataclass(frozen=True)
class PackedSet:
    """A set on disk, mapped into memory.

    Attributes:
        spec: What it holds.
        payload: uint8[payload_bytes]: Samples back to back.
        offsets: int64[num_samples + 1].
        labels: int64[num_samples]: Rise with the id, as in a folder of class folders.
    """

    spec: SampleSet
    payload: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]

    def sample(self, sample_id: int) -> NDArray[np.uint8]:
        """View one sample's bytes."""
        return self.payload[self.offsets[sample_id] : self.offsets[sample_id + 1]]

    def rows(self) -> NDArray[np.uint8]:
        """uint8[num_samples, sample_bytes]: View a set of fixed size as one array."""
        return self.payload.reshape(self.spec.num_samples, self.spec.sample_bytes)


def make_labels(num_samples: int) -> NDArray[np.int64]:
    """int64[num_samples]: Classes in the order of ids, so that a weak shuffle can be seen."""
    return np.arange(num_samples, dtype=np.int64) * NUM_CLASSES // num_samples


def make_set(spec: SampleSet, directory: Path) -> None:
    """Write a set, unless the same is there. It appears whole or not at all."""
    stamp = directory / "set.json"
    if stamp.exists() and open_set(directory).spec == spec:
        return
    shutil.rmtree(directory, ignore_errors=True)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    lengths: list[int] = []
    with open(partial / "payload.bin", "wb") as file:
        samples = {"fixed": _blocks, "jpeg": _images, "recipe": _photos}[spec.kind](spec)
        for sample in samples:
            file.write(sample)
            lengths.append(len(sample))
    if not spec.is_jpeg:
        lengths = [spec.sample_bytes] * spec.num_samples
    np.save(partial / "offsets.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    np.save(partial / "labels.npy", make_labels(spec.num_samples))
    (partial / "set.json").write_text(json.dumps(asdict(spec)))
    os.replace(partial, directory)


def open_set(directory: Path) -> PackedSet:
    """Map a set."""
    described = json.loads((directory / "set.json").read_text())
    photo = described.pop("photo")
    spec = SampleSet(**described, photo=tuple(photo) if photo else None)
    return PackedSet(
        spec,
        np.memmap(directory / "payload.bin", np.uint8, "r"),
        np.load(directory / "offsets.npy"),
        np.load(directory / "labels.npy"),
    )


def _blocks(spec: SampleSet) -> Iterator[bytes | memoryview]:
    rng = np.random.default_rng(spec.seed)
    per_block = max(BLOCK_BYTES // spec.sample_bytes, 1)
    for first in range(0, spec.num_samples, per_block):
        ids = np.arange(first, min(first + per_block, spec.num_samples), dtype="<i8")
        rows = np.frombuffer(rng.bytes(len(ids) * spec.sample_bytes), np.uint8).copy()
        rows = rows.reshape(len(ids), spec.sample_bytes)
        rows[:, :8] = ids.view(np.uint8).reshape(-1, 8)
        yield rows.data.cast("B")


def _images(spec: SampleSet) -> Iterator[bytes | memoryview]:
    """Images with detail at every scale, as photographs have: 15 to 25 KB each."""
    import simplejpeg

    rng = np.random.default_rng(spec.seed)
    fields = [_noise(rng) for _ in range(8)]
    for label in make_labels(spec.num_samples).tolist():
        one, two = rng.choice(len(fields), 2, replace=False)
        shifts = rng.integers(0, IMAGE_SIDE, 2)
        mixed = fields[one] + np.roll(fields[two], shifts, axis=(0, 1)) * rng.uniform(0.2, 1.2)
        pixels = np.clip(mixed + 128, 0, 255).astype(np.uint8)
        pixels[:CORNER, :CORNER] = corner_brightness(label)
        yield simplejpeg.encode_jpeg(pixels, quality=JPEG_QUALITY, colorsubsampling="420")


def _photos(spec: SampleSet) -> Iterator[bytes | memoryview]:
    """Photos with much detail, whose sides differ by 15 % either way."""
    import simplejpeg

    assert spec.photo is not None
    rng = np.random.default_rng(spec.seed)
    width, height = spec.photo
    tiles = (-(-height * 5 // 4 // IMAGE_SIDE), -(-width * 5 // 4 // IMAGE_SIDE), 1)
    noise = [np.tile(_noise(rng), tiles) for _ in range(4)]
    for label in make_labels(spec.num_samples).tolist():
        tall, wide = (int(side * rng.uniform(0.85, 1.15)) for side in (height, width))
        field = noise[int(rng.integers(len(noise)))][:tall, :wide]
        grain = rng.standard_normal((tall, wide, 1), np.float32) * PHOTO_GRAIN
        pixels = np.clip(field + grain + corner_brightness(label), 0, 255).astype(np.uint8)
        yield simplejpeg.encode_jpeg(pixels, quality=PHOTO_QUALITY, colorsubsampling="420")


def corner_brightness(label: NDArray[np.int64] | int) -> NDArray[np.int64] | int:
    """Brightness, in [0, 255], of the corner of an image, or of a photo on the whole."""
    return 30 + 2 * label


def _noise(rng: np.random.Generator) -> NDArray[np.float32]:
    total = np.zeros((IMAGE_SIDE, IMAGE_SIDE, 3), np.float32)
    for scale, strength in ((64, 22.0), (32, 14.0), (16, 10.0), (8, 8.0), (4, 7.0), (2, 5.0)):
        coarse = rng.standard_normal((IMAGE_SIDE // scale, IMAGE_SIDE // scale, 3))
        fine = coarse.repeat(scale, 0).repeat(scale, 1).astype(np.float32)
        for axis in (0, 1):
            kernel = [np.roll(fine, shift, axis) for shift in range(-(scale // 2), scale // 2)]
            fine = np.mean(kernel, axis=0)
        total += strength * fine
    return total
