"""What every source says of itself, and what a cache keeps of that."""

import json

import numpy as np
import pytest

from dataio import Int, Loader, NumpySource
from dataio.source import DatasetSource, Storage, TransformedSource
from dataio.source.base import Shard, ShardedSource, costs_of
from dataio.source.formats.folder import ImageFolderSource
from dataio.source.listing import FORMATS
from dataio.world import single_world
from tests.opened import make_pool


class Bare:
    """A user's own source, as it was written before sources said how large they are."""

    name = fingerprint = "bare"
    num_samples = 4
    shard_starts = np.zeros(1, np.int64)
    bytes_read = 0

    def read(self, sample_ids, fields):
        raise AssertionError("nothing is read of it")


def test_a_source_that_lacks_a_member_is_refused_with_its_name(tmp_path):
    with pytest.raises(
        TypeError, match=r"Loader: source is .*Bare.* dataio.Source; add made_as, total_bytes to it"
    ):
        Loader(
            Bare(),  # type: ignore[arg-type]
            batch_size=2, fields={"label": Int("cls")}, cache=tmp_path,
        )  # fmt: skip


@pytest.mark.parametrize("costs", [[1, 2, 3, 4], np.ones(3, np.uint8), np.ones(4)])
def test_costs_that_are_not_a_byte_a_sample_are_refused(costs):
    source = NumpySource({"cls": np.arange(4)}, name="numpy://costs")
    assert costs_of(source) is None
    source.costs = costs  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"costs is .*, expected uint8\[4\], one number a sample"):
        costs_of(source)


def test_what_a_cache_keeps_of_a_source_never_changes(tmp_path):
    """Caches that were made before are found again: directories' names, and what meta.json has."""
    kinds = {
        kind: kind.made_as
        for kind in (NumpySource, DatasetSource, ImageFolderSource, TransformedSource)
    }
    assert all(kind.__name__ == made_as for kind, made_as in kinds.items())
    numpy_source = NumpySource({"cls": np.arange(8)}, name="numpy://golden")
    tar_source = ShardedSource(
        "s3://golden/x.tar", FORMATS[".tar"], [Shard("x.tar", 8, 0)], fingerprint="f",
        storage=Storage(),
    )  # fmt: skip
    kept: dict[str, str] = {}
    for source in (numpy_source, tar_source):
        root = tmp_path / str(len(kept))
        make_pool(
            source, {"label": Int("cls")}, world=single_world(), root=root, num_slots=8,
            num_leaving=0,
        ).close()  # fmt: skip
        (meta,) = root.glob("*/node0/meta.json")
        kept[meta.parents[1].name] = json.loads(meta.read_text())["source"]
    assert kept == {
        "golden-d0c6b2a83ff6": "NumpySource:numpy://golden",
        "x-tar-b453bb139f27": "s3://golden/x.tar",
    }
