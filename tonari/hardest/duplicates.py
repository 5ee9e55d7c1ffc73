"""`tonari hardest --duplicates`: groups of nearly equal samples, as a table and a page."""

import json as json_module
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from PIL import Image as PillowImage

from dataio import Field, Source
from dataio.base.atomic import write_file
from dataio.rows.decode import PILLOW_ERRORS, open_picture
from dataio.rows.encoding import NPY_LOCK
from dataio.source.names import find_name, read_blocks, read_field
from tonari.errors import CommandError
from tonari.hardest.fingerprint import SIDE, hash_pictures, similarity
from tonari.hardest.groups import Pairs, equal_pairs, group, kept_of, near_embeddings, near_hashes
from tonari.hardest.page import duplicates_page
from tonari.hardest.samples import find_places
from tonari.report.tables import to_csv

HEADER = (
    "group", "sample_id", "key", "shard", "position", "label", "class", "similarity",
    "labels_disagree", "kept",
)  # fmt: skip

SIMILAR_PICTURES, SIMILAR_EMBEDDINGS = 0.85, 0.95
"""What two samples must have in common by default."""


@dataclass(frozen=True)
class Look:
    """How duplicates are looked for.

    Attributes:
        source: The samples.
        image: Where their pictures are; None: there are none, or they are not looked at.
        content: Of which equal bytes make equal samples; None: the picture.
        embeddings: float[num_samples, width], in place of pictures.
        least: Least similarity; None: a usual one.
    """

    source: Source
    image: Field | None
    content: Field | None
    embeddings: NDArray[np.floating] | None
    least: float | None


def find_pairs(look: Look) -> Pairs:
    """Find equal and similar samples.

    Raises:
        CommandError: If there is nothing to compare.
    """
    source, content = look.source, look.content or look.image
    if content is None and look.embeddings is None:
        raise CommandError(
            f"--duplicates: found no image in {source.name}, expected one, or what else is "
            "compared; name it with --image, name a field whose equal bytes make equal samples "
            "with --content, or give --embeddings"
        )
    found = []
    if content is not None:
        pictures = look.image is not None and look.embeddings is None and look.content is None
        digests, small = _read_all(source, content, pictures=pictures)
        found.append(equal_pairs(digests))
        if small is not None:
            found.append(near_pictures(small, least=look.least or SIMILAR_PICTURES))
    if look.embeddings is not None:
        found.append(near_embeddings(look.embeddings, least=look.least or SIMILAR_EMBEDDINGS))
    return Pairs(*map(np.concatenate, zip(*found, strict=True)))


def near_pictures(small: NDArray[np.uint8], *, least: float) -> Pairs:
    """Find near copies among small grey pictures, uint8[num_samples, SIDE, SIDE]."""
    first, second = near_hashes(hash_pictures(small))
    alike = similarity(small, first, second)
    near = alike >= least
    return Pairs(first[near], second[near], alike[near])


def _read_all(
    source: Source, content: Field, *, pictures: bool
) -> tuple[NDArray[np.uint64], NDArray[np.uint8] | None]:
    """Digest the contents of all samples, and shrink their pictures if asked; 1 KiB each."""
    digests = np.empty((source.num_samples, 2), np.uint64)
    small = np.zeros((source.num_samples, SIDE, SIDE), np.uint8) if pictures else None
    start = 0
    for block in read_blocks(source, np.arange(source.num_samples), content):
        part = slice(start, start + len(block))
        start = part.stop
        words = b"".join(xxhash.xxh3_128_digest(_bytes(value)) for value in block)
        digests[part] = np.frombuffer(words, np.uint64).reshape(-1, 2)
        if small is not None:
            small[part] = shrink(block.tolist())
    return digests, small


def shrink(pictures: Sequence[bytes]) -> NDArray[np.uint8]:
    """Decode pictures, and make of each a small grey one: uint8[num_pictures, SIDE, SIDE]."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return np.array(list(threads.map(_small, pictures)), np.uint8).reshape(-1, SIDE, SIDE)


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _small(data: bytes) -> NDArray[np.uint8]:
    """Shrink a picture to SIDE x SIDE, grey; one without contrast where it does not decode."""
    try:
        grey = open_picture(data, draft=("L", (2 * SIDE, 2 * SIDE))).convert("L")
        return np.asarray(grey.resize((SIDE, SIDE), PillowImage.Resampling.BOX))
    except PILLOW_ERRORS:
        return np.zeros((SIDE, SIDE), np.uint8)


def make_groups(
    pairs: Pairs, source: Source, label: Field | None, classes: Mapping[str, str]
) -> list[list[dict[str, object]]]:
    """List what is known of the samples of each group: a row each, by the names of `HEADER`.

    Groups whose labels disagree come first, then larger ones.
    """
    groups = group(pairs, source.num_samples)
    ids = np.concatenate([np.empty(0, np.int64), *groups])
    place = {sample_id: number for number, sample_id in enumerate(ids.tolist())}
    labels = read_field(source, ids, label) if label is not None and len(ids) else None
    own_label = [None] * len(ids) if labels is None else labels.tolist()
    field = find_name(source) if len(ids) else None
    names = read_field(source, ids, field).tolist() if field is not None else [None] * len(ids)
    places, most = find_places(source, ids), np.zeros(len(ids), np.float32)
    for side in (pairs.first, pairs.second):
        np.maximum.at(most, [place[i] for i in side.tolist()], pairs.similarity)
    made = []
    for members in groups:
        at = [place[i] for i in members.tolist()]
        own = None if labels is None else labels[at]
        disagree = own is not None and len(np.unique(own)) > 1
        kept = kept_of(members, own)
        rows = []
        for i, sample_id in zip(at, members.tolist(), strict=True):
            shard, position = places[i]
            rows.append(
                {"sample_id": sample_id, "key": names[i], "shard": shard, "position": position,
                 "label": own_label[i], "class": classes.get(str(own_label[i])),
                 "similarity": round(float(most[i]), 4), "labels_disagree": disagree,
                 "kept": sample_id == kept}
            )  # fmt: skip
        made.append(rows)
    made.sort(key=lambda rows: (not rows[0]["labels_disagree"], -len(rows)))
    return [[{"group": number, **row} for row in rows] for number, rows in enumerate(made, start=1)]


def write_duplicates(
    look: Look,
    label: Field | None,
    classes: Mapping[str, str],
    out: Path,
    *,
    most_pictures: int,
    json: bool,
) -> None:
    """Find groups, write them and the samples to leave out, and report what was found."""
    groups = make_groups(find_pairs(look), look.source, label, classes)
    rows = [row for members in groups for row in members]
    left_out = [row for row in rows if not row["kept"]]
    write_file(out / "duplicates.csv", to_csv(HEADER, rows).encode())
    write_file(out / "exclude.csv", to_csv(("sample_id", "key"), left_out).encode())
    images = None
    if look.image is not None and rows:
        ids = np.array([row["sample_id"] for row in rows[:most_pictures]], np.int64)
        images = read_field(look.source, ids, look.image).tolist()
    disagree = sum(bool(members[0]["labels_disagree"]) for members in groups)
    title = (
        f"{len(groups):,} groups of near duplicates among {look.source.num_samples:,} samples, "
        f"{disagree:,} with labels that disagree"
    )
    write_file(out / "duplicates.html", duplicates_page(rows, images, title=title).encode())
    if json:
        document = {
            "groups": len(groups), "labels_disagree": disagree, "samples": len(rows),
            "left_out": len(left_out), "csv": str(out / "duplicates.csv"),
            "html": str(out / "duplicates.html"), "exclude": str(out / "exclude.csv"),
        }  # fmt: skip
        print(json_module.dumps(document))
        return
    print(
        f"{title}: {out / 'duplicates.csv'}; to look through them open "
        f"{out / 'duplicates.html'}; all but one of each group, {len(left_out):,} samples, are "
        f"listed in {out / 'exclude.csv'}, for Loader(exclude=)"
    )


def read_embeddings(path: Path, num_samples: int) -> NDArray[np.floating]:
    """Map embeddings, one row a sample.

    Raises:
        CommandError: If the file is none of that.
    """
    try:
        with NPY_LOCK:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"--embeddings {path}: cannot be read ({error}), expected an .npy file; write it with "
            "np.save"
        ) from error
    if found.ndim != 2 or len(found) != num_samples or found.dtype.kind != "f":
        raise CommandError(
            f"--embeddings {path}: {found.dtype}{list(found.shape)}, expected float"
            f"[{num_samples}, width], a row for each sample; compute them in the order of the "
            "source"
        )
    return np.asarray(found) if found.nbytes < 1 << 30 else found
