"""What caches know a source by. Changing a value here has every user's cache staged anew."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataio.source import Sequences, open_source
from tests.dataio.source.formats.record_cases import RECORDS, megatron
from tests.dataio.source.shards import numbered, write_tar

WRITTEN_NS = 10**18
"""When all files were written."""


def tar(directory: Path) -> str:
    for number in range(3):
        write_tar(directory / f"{number}.tar", numbered(20, first=20 * number))
    return str(directory)


def folder(directory: Path) -> str:
    for name in ("cat/0.png", "cat/1.png", "dog/0.png"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(name.encode())
    return str(directory)


def arrays(directory: Path) -> Any:
    np.save(directory / "y.npy", np.arange(6, dtype=np.int64))
    return {"x": np.arange(12, dtype=np.float32).reshape(6, 2), "y": directory / "y.npy"}


def npy(directory: Path) -> str:
    np.save(directory / "y.npy", np.arange(6, dtype=np.int64))
    return str(directory / "y.npy")


WRITERS: dict[str, Callable[[Path], Any]] = {
    **{case.name: case.write for case in RECORDS}, "tar": tar, "folder": folder,
    "arrays": arrays, "npy": npy,
}  # fmt: skip
FINGERPRINTS = {
    "mds": "776f195a1ca6c632",
    "mds-zstd": "676e1f69b3d946c1",
    "mds-gz": "33e479c85e352010",
    "litdata": "328ce067cba0147a",
    "litdata-zstd": "be04ac2d67d6902d",
    "tfrecord": "a4a2239a7d521a47",
    "tfrecord-gz": "38beab66f89951fb",
    "jsonl": "ad0692185d388d2f",
    "megatron": "cc831c2c0ef1c922",
    "tar": "2bb06c7965dd4e35",
    "folder": "01cfc26cd5fe0605",
    "arrays": "4f8368368549cde2",
    "npy": "a58a46667888ad4e",
}


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_a_source_is_known_by_what_it_was_known_by(tmp_path: Path, name: str) -> None:
    spec = WRITERS[name](tmp_path)
    freeze(tmp_path)
    assert open_source(spec).fingerprint == FINGERPRINTS[name]


@pytest.mark.parametrize(
    ("write", "options", "fingerprint"),
    [
        (tar, {"grows": True}, "da93627f79786504"),
        (tar, {"joined": True}, "2bb06c7965dd4e35"),
        (megatron, {"sequences": Sequences(4)}, "a4461a71aa32dd98"),
        (megatron, {"sequences": Sequences(4, packing="concatenated")}, "c7369d792bd055c6"),
    ],
)
def test_a_source_that_is_read_in_another_way_too(
    tmp_path: Path, write: Callable[[Path], str], options: dict[str, Any], fingerprint: str
) -> None:
    spec = write(tmp_path)
    freeze(tmp_path)
    assert open_source(spec, **options).fingerprint == fingerprint


def freeze(directory: Path) -> None:
    """Give all files and directories one time of change."""
    for path in [*directory.rglob("*"), directory]:
        os.utime(path, ns=(WRITTEN_NS, WRITTEN_NS))
