"""Composer's own loop over the example's loader."""

import sys

import pytest
import torch

from examples import blobs
from tests import torchvision_v2

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def example():
    pytest.importorskip("composer", reason="needs mosaicml: pip install mosaicml")
    return pytest.importorskip("examples.composer_fit")


@pytest.fixture(scope="module", autouse=True)
def torchvision():
    """Composer imports it, also where its operators do not load."""
    if "composer" not in sys.modules:
        torchvision_v2.import_or_skip()


@pytest.mark.slow
def test_epochs_have_a_plain_loaders_order_and_go_on_from_a_checkpoint(example, tmp_path):
    blobs.write_blobs(tmp_path / "blobs")
    with example.make_loader(tmp_path / "blobs", cache=tmp_path / "plain") as plain:
        orders = []
        for _ in plain.epochs(3):
            orders.append(plain.order_hash())
            for _ in plain:
                pass
    with example.make_loader(tmp_path / "blobs", cache=tmp_path / "whole") as loader:
        whole = example.fit(loader, tmp_path / "saved", epochs=3)
    assert whole.orders == orders
    with example.make_loader(tmp_path / "blobs", cache=tmp_path / "again") as loader:
        again = example.fit(
            loader, tmp_path / "other", epochs=3, resume=str(tmp_path / "saved/ep2")
        )
    assert again.orders == orders[2:]
    ends = [
        torch.load(path / "ep3/rank0.pt", weights_only=False)["state"]["model"]
        for path in (tmp_path / "saved", tmp_path / "other")
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
