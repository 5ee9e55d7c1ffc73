"""Delivery costs nothing on a CPU; on a GPU it copies beside the work and gives buffers back."""

from typing import Any

import pytest
import torch

from dataio.base.buffers import BufferRing
from dataio.batch.feed import DeviceDelivery


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_on_a_cpu_batches_are_passed_on_untouched(device):
    batches = iter([{"x": torch.zeros(2)}])
    delivery = DeviceDelivery(device)
    assert delivery(batches) is batches
    assert not delivery.pinned


def test_on_another_device_every_tensor_moves_and_lists_stay():
    batch: Any = {
        "x": torch.zeros(2),
        "names": ["a", "b"],
        "ragged": [torch.zeros(1), torch.zeros(3)],
    }
    (moved,) = DeviceDelivery(torch.device("meta"))(iter([batch]))
    assert moved["x"].device.type == "meta"
    assert moved["names"] == ["a", "b"]
    assert [value.device.type for value in moved["ragged"]] == ["meta", "meta"]


@pytest.mark.gpu
def test_on_a_gpu_batches_arrive_whole_while_their_buffers_are_reused():
    ring, delivery = BufferRing(pinned=True), DeviceDelivery(torch.device("cuda"))

    def batches():
        for number in range(200):
            array = ring.take((1 << 16,), "int64")
            array[:] = number
            tensor = torch.from_numpy(array)
            assert tensor.is_pinned()
            yield {"x": tensor}

    for number, batch in enumerate(delivery(batches())):
        assert batch["x"].is_cuda
        # Work that is still queued when the next copies begin.
        total = batch["x"]
        for _ in range(20):
            total = total * 1
        assert (total == number).all(), number
    assert ring.num_allocated < 50
