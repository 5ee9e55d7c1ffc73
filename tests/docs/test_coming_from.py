"""docs/coming_from.md: the blocks of WebDataset and of Tonari run, and give batches alike."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import torchvision_v2
from tests.dataio.source.shards import write_tar
from tests.docs.blocks import blocks_of
from tests.multirank import ROOT

BLOCKS = [block.text for block in blocks_of(ROOT / "docs/coming_from.md")]


def jpg(number: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (40 + number, 48, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "name", ["import dataio", pytest.param("import webdataset", marks=pytest.mark.thorough)]
)
def test_the_block_trains_on_batches_of_pictures(tmp_path, monkeypatch, name):
    (block,) = (block for block in BLOCKS if name in block)
    if "torchvision" in block:
        torchvision_v2.import_or_skip()
    for shard in range(4):
        ids = range(4 * shard, 4 * shard + 4)
        members = (
            [(f"s{n}.jpg", jpg(n)) for n in ids],
            [(f"s{n}.cls", b"%d" % (n % 3)) for n in ids],
        )
        path = tmp_path / "shards" / f"train-{shard:06d}.tar"
        path.parent.mkdir(exist_ok=True)
        write_tar(path, [member for pair in zip(*members, strict=True) for member in pair])
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {
        "__name__": "__main__",
        "batch_size": 4,
        "num_epochs": 1,
        "rank": 0,
        "world_size": 1,
    }
    exec(compile(block, "docs/coming_from.md", "exec"), given)
    assert tuple(given["images"].shape) == (4, 3, 224, 224)
    assert set(given["labels"].tolist()) <= {0, 1, 2}
