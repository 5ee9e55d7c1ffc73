"""Ray Train's workers, each with the example's loader."""

import pytest
import torch

from examples import blobs

pytestmark = [pytest.mark.slow, pytest.mark.multirank, pytest.mark.filterwarnings("default")]


def test_two_workers_have_a_plain_loaders_orders_and_go_on_where_they_were_saved(
    tmp_path, monkeypatch
):
    pytest.importorskip("ray.train.torch", reason="pip install 'ray[train]'")
    from examples import ray_train

    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "cache"))
    blobs.write_blobs(tmp_path / "blobs")
    whole = ray_train.fit(tmp_path / "blobs", tmp_path / "saved", workers=2, epochs=3)
    again = ray_train.fit(
        tmp_path / "blobs", tmp_path / "other", workers=2, epochs=3,
        resume=str(tmp_path / "saved/epoch-2"),
    )  # fmt: skip
    assert whole.metrics["epoch"] == again.metrics["epoch"] == 2
    assert whole.metrics["orders"] == again.metrics["orders"]
    ends = [
        torch.load(path / "epoch-3/model.pt", weights_only=True)["model"]
        for path in (tmp_path / "saved", tmp_path / "other")
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
