"""How many planted near copies does `tonari hardest --duplicates` find, and how fast?

    python examples/near_duplicates.py data/cifar10-train.parquet --copies 3000
    python examples/near_duplicates.py --hashes 1000000

Near copies of some images of a Parquet file (jpg) are put among all of them: moved by a pixel,
written again as JPEG of quality 50, or brighter or darker by a fifth. One line of JSON: the share
of each kind whose pair is found (recall); pairs of a copy and neither its original nor a sample
that is in one group with that where nothing is planted (``strangers``; precision is found pairs
without these); and the groups without any copy. With --hashes: the time that random hashes take.
"""

import argparse
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from dataio.base.seeding import generator, key
from tonari.hardest.duplicates import near_pictures, shrink
from tonari.hardest.groups import Pairs, group, near_hashes

KINDS = ("moved", "jpeg", "brightness")


def near_copy(data: bytes, kind: str, rng: np.random.Generator) -> bytes:
    """Make a near copy of a picture."""
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    file = io.BytesIO()
    if kind == "moved":
        down, right = [(0, 1), (1, 0), (1, 1), (0, -1), (-1, 0), (-1, -1)][rng.integers(6)]
        padded = np.pad(pixels, ((1, 1), (1, 1), (0, 0)), mode="edge")
        height, width = pixels.shape[:2]
        pixels = padded[1 + down : 1 + down + height, 1 + right : 1 + right + width]
    if kind == "brightness":
        pixels = np.clip(pixels * rng.choice([0.8, 1.2]), 0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    if kind == "jpeg":
        image.save(file, "JPEG", quality=50)
    else:
        image.save(file, "PNG")
    return file.getvalue()


def study(path: Path, num_copies: int, least: list[float]) -> Iterator[dict[str, object]]:
    """Plant near copies, look for them, and judge by several similarities."""
    images = pq.read_table(path, columns=["jpg"]).column("jpg").to_pylist()
    rng = generator(key(0, "near copies"))
    originals = rng.choice(len(images), num_copies, replace=False)
    kinds = np.arange(num_copies) % len(KINDS)
    copies = [
        near_copy(images[original], KINDS[kind], rng)
        for original, kind in zip(originals.tolist(), kinds.tolist(), strict=True)
    ]
    small = shrink(images + copies)
    started = time.process_time()
    everything = near_pictures(small, least=min(least))
    seconds = time.process_time() - started
    untouched = near_pictures(small[: len(images)], least=min(least))
    for enough in least:
        pairs = _of_at_least(everything, enough)
        as_it_is = group(_of_at_least(untouched, enough), len(images))
        of_group = np.arange(len(small))
        for members in as_it_is:
            of_group[members] = members[0]
        # A copy is of its original's group
        of_group[len(images) :] = of_group[originals]
        found = set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))
        hit = np.array(
            [(original, len(images) + i) in found for i, original in enumerate(originals.tolist())]
        )
        with_copy = pairs.second >= len(images)
        strangers = with_copy & (of_group[pairs.first] != of_group[pairs.second])
        yield {
            "images": len(images), "copies": num_copies, "least": enough,
            "cpu_s": round(seconds, 1),
            "recall": {
                name: round(float(hit[kinds == i].mean()), 4) for i, name in enumerate(KINDS)
            },
            "pairs_with_a_copy": int(with_copy.sum()), "strangers": int(strangers.sum()),
            "precision": round(1 - float(strangers.sum() / max(with_copy.sum(), 1)), 4),
            "groups_as_it_is": len(as_it_is), "samples_in_them": sum(map(len, as_it_is)),
        }  # fmt: skip


def _of_at_least(pairs: Pairs, least: float) -> Pairs:
    near = pairs.similarity >= least
    return Pairs(pairs.first[near], pairs.second[near], pairs.similarity[near])


def clock(num_hashes: int) -> dict[str, object]:
    """Time the search among random hashes, a hundredth of them copies with 6 bits changed."""
    rng = generator(key(0, "hashes"))
    hashes: NDArray[np.uint64] = rng.integers(0, 1 << 63, num_hashes, np.uint64)
    num_copies = num_hashes // 100
    copies = hashes[:num_copies].copy()
    for _ in range(6):
        copies ^= np.uint64(1) << rng.integers(0, 64, num_copies).astype(np.uint64)
    hashes[-num_copies:] = copies
    started = time.process_time()
    first, second = near_hashes(hashes)
    seconds = time.process_time() - started
    hits = (second - first == num_hashes - num_copies) & (first < num_copies)
    return {
        "hashes": num_hashes, "cpu_s": round(seconds, 1), "pairs": len(first),
        "recall_of_6_bits": round(int(hits.sum()) / num_copies, 4),
    }  # fmt: skip


def main() -> None:
    """Print a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parquet", type=Path, nargs="?", help="a column jpg")
    parser.add_argument("--copies", type=int, default=3000)
    parser.add_argument("--least", type=float, nargs="+", default=[0.8, 0.85, 0.9])
    parser.add_argument("--hashes", type=int, default=0)
    given = parser.parse_args()
    if given.hashes:
        print(json.dumps(clock(given.hashes)), flush=True)
    if given.parquet is not None:
        for told in study(given.parquet, given.copies, given.least):
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
