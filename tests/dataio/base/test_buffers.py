import gc
import sys

import numpy as np
import torch

from dataio.base.buffers import MAX_IDLE, BufferRing


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


def test_idle_memory_is_bounded():
    ring = BufferRing()
    kept = [ring.take((1000,), np.uint8) for _ in range(50)]
    del kept
    gc.collect()
    again = [ring.take((1000,), np.uint8) for _ in range(50)]
    assert ring.num_allocated == 100 - MAX_IDLE
    del again


def test_lengths_that_vary_a_little_share_memory():
    ring = BufferRing()
    for length in range(10_000, 11_000):
        ring.take((length,), np.uint8)[-1] = 1
    assert ring.num_allocated <= 3


def test_an_array_may_outlive_its_ring():
    ring = BufferRing()
    array = ring.take((100,), np.int64)
    array[:] = 3
    del ring
    gc.collect()
    assert (array == 3).all()


def test_no_python_runs_as_an_array_dies():
    """A Ctrl-C that came within a callback would be printed and forgotten."""
    ring = BufferRing()
    called = []
    for _ in range(3):
        array = ring.take((64,), np.uint8)
        array[:] = 1
        sys.setprofile(lambda frame, event, arg: called.append((event, frame.f_code.co_name)))
        del array
        sys.setprofile(None)
    assert [event for event, _ in called if event == "call"] == []
    assert ring.num_allocated == 1
