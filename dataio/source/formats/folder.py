"""Directories of images, one for each class, as torchvision has them."""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Field, Raw
from dataio.rows.rows import Rows
from dataio.source.base import check_ids
from dataio.source.row_block import RowBlock
from dataio.source.storage.files import Storage

log = logging.getLogger(__name__)

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
KEYS = ("image", "label", "path")
NO_CLASSES = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "lost+found")
"""Directories that systems make beside those of a dataset; hidden ones are left out too."""

OF_SYSTEMS = ("Thumbs.db", "desktop.ini")
"""Files that systems write beside pictures, and that nobody misses."""
NUM_NAMED = 8
"""Kinds of files that are left out, in a warning."""

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
        variant: Other than "" where classes have other numbers than the folder's own: such rows
            have a cache of their own.
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
        self._labels = list(range(len(counts)))
        self.variant = ""

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
                        "label": self._label(sample_id),
                        "path": self._path(sample_id),
                    }
                    raw = {name: values[key] for name, key in keys.items()}
                    block.add(sample_id, raw, f"{self.place_of(sample_id)}: sample {sample_id}")
                    if block.full:
                        yield block.take()
        if len(block):
            yield block.take()

    def class_names(self, key: str) -> list[str] | None:
        """Name the classes that a key's numbers stand for; see `dataio.source.classes`."""
        return self.classes if key == "label" else None

    def numbered_as(self, classes: Sequence[str]) -> "ImageFolderSource":
        """Number the classes as another folder does.

        Args:
            classes: Names of the other's, by number; this one may lack some.

        Raises:
            SourceError: If this folder has a class that is none of them.
        """
        new = [name for name in self.classes if name not in classes]
        if new:
            raise SourceError(
                f"{self.name}: has the classes {', '.join(new)}, expected only those that have a "
                f"number already: {', '.join(classes)}; move or rename these directories"
            )
        numbered = copy(self)
        numbered._labels = [list(classes).index(name) for name in self.classes]
        numbered.classes = list(classes)
        if numbered._labels != self._labels:  # the cache keeps labels
            marks = json.dumps([self.fingerprint, numbered._labels])
            numbered.variant = numbered.fingerprint = xxhash.xxh3_64_hexdigest(marks.encode())
        return numbered

    def _label(self, sample_id: int) -> int:
        return self._labels[int(np.searchsorted(self._class_ends, sample_id, side="right"))]

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

    Names that begin with a dot, and `NO_CLASSES`, are no classes and no images.

    Raises:
        SourceError: If a class holds no image, a link leads nowhere or into itself, or a directory
            cannot be listed.
    """
    classes = _class_names(root)
    paths: list[str] = []
    counts: list[int] = []
    others: Counter[str] = Counter()
    marks = xxhash.xxh3_64()
    for name in classes:
        directory = f"{root}/{name}"
        found = _images(directory, storage, others)
        if not found:
            raise SourceError(
                f"{directory}: the directory holds no image, expected each directory to be a "
                f"class with files ending in {', '.join(IMAGE_SUFFIXES)}; remove or fill it"
            )
        paths += found
        counts.append(len(found))
        marks.update(os.fsencode(f"{name} {Path(directory).stat().st_mtime_ns}"))
    if others:
        log.warning(
            "%s: %d files in the directories of the classes are not read (%s): they are left out; "
            "write pictures among them as one of %s", root, others.total(),
            ", ".join(f"{count} {end}" for end, count in others.most_common(NUM_NAMED)),
            ", ".join(IMAGE_SUFFIXES),
        )  # fmt: skip
    names = b"".join(os.fsencode(path[len(root) + 1 :]) + b"\0" for path in paths)
    marks.update(names)
    for path in paths[:: -(-len(paths) // NUM_CHECKED) or 1]:
        status = Path(path).stat()
        marks.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    return json.dumps([root, marks.hexdigest(), classes, counts]).encode() + b"\0" + names


def _class_names(root: str) -> list[str]:
    found = _listed(root)
    if found.images:
        log.warning(
            "%s: %d images lie beside the directories of the classes, such as %s, and are of none: "
            "they are left out", root, len(found.images), found.images[0],
        )  # fmt: skip
    return sorted(found.directories)


def _images(directory: str, storage: Storage, others: Counter[str]) -> list[str]:
    """List the images of a class, directory by directory as torchvision's walk does.

    Args:
        directory: Of the class.
        storage: Waits for its turn.
        others: What files that are not read end with is counted here.

    Raises:
        SourceError: If a directory cannot be listed, or lies in itself by a link.
    """
    images: dict[str, list[str]] = {}
    # Directories with the (device, inode) of those above and their own.
    left: list[tuple[str, tuple[tuple[int, int], ...]]] = [(directory, ())]
    while left:
        place, above = left.pop()
        storage.take_turn()
        status = Path(place).stat()
        own = status.st_dev, status.st_ino
        if own in above:
            raise SourceError(
                f"{place}: is a link to a directory that it lies in, so that each image would come "
                "without end; remove the link"
            )
        found = _listed(place)
        images[place] = found.images
        others.update(found.others)
        left += [(f"{place}/{name}", (*above, own)) for name in found.directories]
    return [f"{place}/{name}" for place in sorted(images) for name in sorted(images[place])]


class _Listed(NamedTuple):
    """What a directory holds, by name and in no order, without what is hidden."""

    directories: list[str]
    images: list[str]
    others: list[str]
    """Of files that are not read, the ends of their names."""


def _listed(directory: str) -> _Listed:
    """List a directory; only links cost more than that.

    Raises:
        SourceError: If it cannot be listed, a link leads nowhere, or an image is no file.
    """
    found = _Listed([], [], [])
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name in NO_CLASSES:
                    continue
                if entry.is_symlink():
                    _check_link(entry)
                if entry.is_dir():
                    found.directories.append(entry.name)
                elif _is_image(entry.name):
                    if not entry.is_file():
                        raise SourceError(
                            f"{entry.path}: is neither a file nor a directory, expected an image; "
                            "remove or rename it"
                        )
                    found.images.append(entry.name)
                elif entry.name not in OF_SYSTEMS:
                    found.others.append(Path(entry.name).suffix or entry.name)
    except OSError as error:
        raise SourceError(
            f"{directory}: cannot be listed ({error}), expected a directory of images; check its "
            "permissions, or remove it"
        ) from error
    return found


def _check_link(entry: "os.DirEntry[str]") -> None:
    try:
        Path(entry.path).stat()
    except OSError as error:
        raise SourceError(
            f"{entry.path}: is a link to {Path(entry.path).readlink()}, where nothing can be read "
            f"({error.strerror}), expected an image or a directory of images; put back what it "
            "names, or remove the link"
        ) from error


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)
