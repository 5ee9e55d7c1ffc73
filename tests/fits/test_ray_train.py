"""Ray Train's workers, each with the example's loader."""

import pytest
import torch

from dataio.world import run_threads, thread_worlds
from examples import blobs

pytestmark = [pytest.mark.slow, pytest.mark.multirank, pytest.mark.filterwarnings("default")]


def test_two_workers_have_a_plain_loaders_orders_and_go_on_where_they_were_saved(
    tmp_path, monkeypatch
):
    pytest.importorskip("ray.train.torch", reason="pip install 'ray[train]'")
    from examples import ray_train

    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "cache"))
    blobs.write_blobs(tmp_path / "blobs")
    data, saved, other = (tmp_path / name for name in ("blobs", "saved", "other"))
    ray_train.fit(data, saved, workers=2, epochs=3)
    ray_train.fit(data, other, workers=2, epochs=3, resume=str(saved / "epoch-2"))
    first, last, again = (
        torch.load(path / "model.pt", weights_only=True)
        for path in (saved / "epoch-1", saved / "epoch-3", other / "epoch-3")
    )

    def order(world):
        cache = tmp_path / "plain"
        with ray_train.make_loader(data, world=world, cache=cache) as loader:
            next(loader.epochs(3))
            return loader.order_hash()

    assert first["orders"].split() == run_threads(thread_worlds([2]), order)
    assert last["orders"] == again["orders"]
    assert all(torch.equal(last["model"][name], again["model"][name]) for name in last["model"])
