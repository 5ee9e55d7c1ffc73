"""Directories of images, one for each class, as torchvision has them."""

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Field, Raw
from dataio.rows.rows import Rows
from dataio.source.base import check_ids
from dataio.source.io.files import Storage
from dataio.source.row_block import RowBlock

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
KEYS = ("image", "label", "path")
NUM_READERS = 8
NUM_CHECKED = 1000
"""Files whose size and time of change go into the fingerprint."""


class ImageFolderSource:
    """A `Source` of files ``<root>/<class>/.../<name>.jpg``, read one by one.

    Fields' keys: ``image`` (the file's bytes), ``label`` (the class's number, by the sorted names),
    ``path`` (below the root).

    Args:
        name: The directory as it was given.
        listing: What `list_images` found.
        storage: Reads and counts.

    Attributes:
        classes: Names, by number.
    """

    made_as = "ImageFolderSource"
    total_bytes = 0

    def __init__(self, name: str, listing: bytes, *, storage: Storage) -> None:
        head, _, names = listing.partition(b"\0")
        self.name = name
        self.fingerprint: str
        self.classes: list[str]
        self._root, self.fingerprint, self.classes, counts = json.loads(head)
        self.storage = storage
        self.num_samples = sum(counts)
        self.shard_starts = np.zeros(1, np.int64)
        # One array of bytes: a million of str would take three times as much on every rank.
        self._names = names
        ends = np.flatnonzero(np.frombuffer(names, np.uint8) == 0)
        self._bounds = np.concatenate([[-1], ends]).astype(np.int64)
        self._class_ends = np.cumsum(counts)

    @property
    def bytes_read(self) -> int:
        return self.storage.bytes_read

    def read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        """Read samples, some files at a time; see `Source.read`."""
        check_ids(self, sample_ids)
        for name, field in fields.items():
            if field.key not in KEYS:
                raise FieldError(
                    f"{self.name}: an image folder holds {', '.join(KEYS)}, expected {field.key!r} "
                    f"for field {name!r}; name one of these"
                )
        return self._read(sample_ids, fields)

    def _read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        block = RowBlock(fields)
        keys = {name: field.key for name, field in fields.items()}
        wants_bytes = "image" in keys.values()
        with ThreadPoolExecutor(NUM_READERS, "tonari-files") as readers:
            step = 8 * NUM_READERS
            for start in range(0, len(sample_ids), step):
                ids = sample_ids[start : start + step].tolist()
                files = readers.map(self._file, ids) if wants_bytes else iter([b""] * len(ids))
                for sample_id, data in zip(ids, files, strict=True):
                    values: dict[str, Raw] = {
                        "image": data,
                        "label": int(np.searchsorted(self._class_ends, sample_id, side="right")),
                        "path": self._path(sample_id),
                    }
                    raw = {name: values[key] for name, key in keys.items()}
                    block.add(sample_id, raw, f"{self.place_of(sample_id)}: sample {sample_id}")
                    if block.full:
                        yield block.take()
        if len(block):
            yield block.take()

    def _path(self, sample_id: int) -> bytes:
        return self._names[self._bounds[sample_id] + 1 : self._bounds[sample_id + 1]]

    def place_of(self, sample_id: int) -> str:
        """Name a sample's file."""
        return f"{self._root}/{os.fsdecode(self._path(sample_id))}"

    def _file(self, sample_id: int) -> bytes:
        with self.storage.open(self.place_of(sample_id)) as file:
            return file.read_at(0, file.size)


def is_image_folder(root: str) -> bool:
    """Whether some directory in it holds an image, looking no further than the first."""
    for name in _class_names(root):
        with os.scandir(f"{root}/{name}") as entries:
            if any(_is_image(entry.name) for entry in entries):
                return True
    return False


def list_images(root: str, storage: Storage) -> bytes:
    """List the classes and their images: classes by name, images by path.

    The fingerprint is of the names, and of the size and time of change of 1,000 files and all
    class directories: a file written over in place may go unnoticed.

    Raises:
        SourceError: If a class holds no image.
    """
    classes = _class_names(root)
    paths: list[str] = []
    counts: list[int] = []
    marks = xxhash.xxh3_64()
    for name in classes:
        directory = f"{root}/{name}"
        found = _images(directory, storage)
        if not found:
            raise SourceError(
                f"{directory}: the directory holds no image, expected each directory to be a "
                f"class with files ending in {', '.join(IMAGE_SUFFIXES)}; remove or fill it"
            )
        paths += found
        counts.append(len(found))
        marks.update(f"{name} {Path(directory).stat().st_mtime_ns}".encode())
    names = b"".join(os.fsencode(path[len(root) + 1 :]) + b"\0" for path in paths)
    marks.update(names)
    for path in paths[:: -(-len(paths) // NUM_CHECKED)]:
        status = Path(path).stat()
        marks.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    return json.dumps([root, marks.hexdigest(), classes, counts]).encode() + b"\0" + names


def _class_names(root: str) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def _images(directory: str, storage: Storage) -> list[str]:
    """List the images of a class, directory by directory as torchvision's walk does."""
    paths: list[str] = []
    for place, _, names in sorted(os.walk(directory, followlinks=True)):
        storage.take_turn()
        paths += [f"{place}/{name}" for name in sorted(names) if _is_image(name)]
    return paths


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)
