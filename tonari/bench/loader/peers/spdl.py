"""SPDL: a pipeline of threads over one mapped array, a batch a task.

Images: by its own decoder where the system has FFmpeg's libraries, else by the one of the others.
The recipe of photos is FFmpeg's: its decoder, and its filters for the crop, the size and the flip.
"""

from collections.abc import Iterator
from ctypes.util import find_library

import numpy as np
import spdl.io
import torch
from numpy.typing import NDArray
from spdl.pipeline import PipelineBuilder

from tonari.bench.errors import BenchError
from tonari.bench.loader.peers.harness import DeliveredBatch, PeerFeed, PeerTask, copy_set, run
from tonari.bench.loader.peers.pixels import decode
from tonari.bench.loader.peers.torch_pillow import draw_box
from tonari.bench.loader.sets import CROP


def load_images(samples: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Decode a batch by SPDL: uint8[batch, height, width, channels]."""
    encoded = [sample.tobytes() for sample in samples]
    buffer = spdl.io.load_image_batch(encoded, width=None, height=None, pix_fmt="rgb24")
    pixels: NDArray[np.uint8] = spdl.io.to_numpy(buffer)
    return pixels


def load_crops(samples: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Decode a batch of photos, each cropped, resized and perhaps flipped: shaped alike."""
    frames = []
    for sample in samples:
        packets = spdl.io.demux_image(sample.tobytes())
        left, top, width, height = draw_box(packets.width, packets.height)
        flip = "hflip," if torch.rand(1).item() < 0.5 else ""
        crop = f"crop={width}:{height}:{left}:{top},scale={CROP}:{CROP}:flags=bilinear"
        filters = f"{crop},{flip}format=pix_fmts=rgb24"
        frames.append(spdl.io.decode_packets(packets, filter_desc=filters))
    pixels: NDArray[np.uint8] = spdl.io.to_numpy(spdl.io.convert_frames(frames))
    return pixels


def open_feed(task: PeerTask) -> PeerFeed:
    """Make what builds a pipeline an epoch."""
    packed = task.open_copy()
    rows = None if packed.spec.is_jpeg else np.asarray(packed.rows())
    own_decoder = rows is None and find_library("avutil") is not None
    if packed.spec.kind == "recipe" and not own_decoder:
        raise BenchError(
            "spdl: found no libavutil, expected FFmpeg's libraries for its crops; install them "
            "(Debian: apt-get install libavdevice59 libavfilter8), or leave out spdl"
        )
    load_pixels = load_crops if packed.spec.kind == "recipe" else load_images
    threads = max(task.workers, 1)

    def load(ids: NDArray[np.int64]) -> DeliveredBatch:
        if rows is not None:
            return DeliveredBatch(ids, packed.labels[ids], rows.take(ids, axis=0))
        samples = [packed.sample(i) for i in ids.tolist()]
        pixels = load_pixels(samples) if own_decoder else decode(samples, packed.spec.shape)
        return DeliveredBatch(ids, packed.labels[ids], pixels)

    def epoch(number: int) -> Iterator[DeliveredBatch]:
        pipeline = (
            PipelineBuilder()
            .add_source(task.batches_of_ids(number, packed.spec.num_samples))
            .pipe(load, concurrency=threads)
            .add_sink(2 * threads)
            .build(num_threads=threads)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return PeerFeed(epoch)


if __name__ == "__main__":
    run(copy_set, open_feed)
