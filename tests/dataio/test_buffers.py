import gc

import numpy as np
import torch

from dataio.buffers import BufferRing


def test_memory_comes_back_when_the_last_view_dies():
    ring = BufferRing()
    array = ring.take((4, 8), np.float32)
    address = array.ctypes.data
    view = torch.from_numpy(array)[1:, 2:].permute(1, 0)
    row = array[3]
    del array
    gc.collect()
    assert ring.take((4, 8), np.float32).ctypes.data != address, "a tensor still sees it"
    del view
    gc.collect()
    assert ring.take((4, 8), np.float32).ctypes.data != address, "a row still sees it"
    del row
    gc.collect()
    assert ring.take((4, 8), np.float32).ctypes.data == address


def test_a_view_of_a_view_of_a_tensor_keeps_the_memory():
    ring = BufferRing()
    kept = torch.from_numpy(ring.take((16,), np.uint8)).view(4, 4).numpy()[1:].T[:1]
    address = kept.base is not None and kept.ctypes.data
    kept[:] = 7
    for _ in range(5):
        other = ring.take((16,), np.uint8)
        other[:] = 0
        del other
    assert address
    assert (kept == 7).all()


def test_a_steady_loop_allocates_once():
    ring = BufferRing()
    for _ in range(50):
        ring.take((64, 3), np.uint8)[:] = 1
    assert ring.num_allocated == 1


def test_empty_and_scalar_shapes_work():
    ring = BufferRing()
    assert ring.take((0, 5), np.int64).shape == (0, 5)
    assert ring.take((3,), np.dtype("<f2")).dtype == np.float16
