"""Pictures that a GPU decodes: boxes and flips are chosen on the host, as for any other.

A GPU takes JPEGs that lie upright. Others, and what it refuses, are decoded on the host, which has
the last word, and copied.
"""

import importlib
import importlib.util
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import simplejpeg
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.dlpack import from_dlpack

from dataio.rows.decode import MOST_RESIZED, find_jpeg_view, intersection, slices
from dataio.rows.image import Image
from dataio.rows.jpeg import Pixels
from dataio.rows.views import Box, Draws, PictureView, Size

PACKAGE = "nvidia.nvimgcodec"


class JpegPart(NamedTuple):
    """A box of a JPEG.

    Attributes:
        data: All of it.
        box: Inside of the picture, in its pixels.
    """

    data: memoryview
    box: Box


class DeviceDecoder(Protocol):
    """Decodes on a device; any thread may call it, one at a time."""

    @property
    def device(self) -> torch.device: ...

    def at_work(self) -> AbstractContextManager[None]:
        """Order what is done within on the device; at the end all of it is done."""
        ...

    def decode(self, parts: Sequence[JpegPart], channels: int) -> list[Tensor | None]:
        """Decode boxes: uint8[height, width, channels] each, on the device; None: it cannot."""
        ...


def find_decoder(device: torch.device | None) -> Callable[[], DeviceDecoder]:
    """Find what decodes on a device.

    Returns:
        Opens it.

    Raises:
        ValueError: If there is none: the message says what is missing, and the cure.
    """
    if device is None or device.type != "cuda":
        raise ValueError(
            f'decode="device", and the loader delivers to device={device}, expected a GPU; give '
            'Loader(device="cuda"), or decode="host"'
        )
    try:
        is_installed = importlib.util.find_spec(PACKAGE) is not None
    except ModuleNotFoundError:
        is_installed = False
    if not is_installed:
        raise _missing("nvImageCodec is not installed")
    return lambda: NvImageCodec(device)


def _missing(found: str) -> ValueError:
    major = str(torch.version.cuda).partition(".")[0]
    return ValueError(
        f'decode="device", and {found}; install it with '
        f"`pip install 'nvidia-nvimgcodec-cu{major}[nvjpeg]'`, or give decode=\"host\""
    )


class NvImageCodec:
    """Decodes by NVIDIA's library of that name, on a stream of its own; the lock guards both.

    Its decoder is for one thread at a time: others' pictures come back broken, or it crashes.

    Args:
        device: A GPU.

    Raises:
        ValueError: If it decodes nothing there.
    """

    def __init__(self, device: torch.device) -> None:
        self._library: Any = importlib.import_module(PACKAGE)
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        kinds = self._library.BackendKind
        self._decoder = self._library.Decoder(
            device_id=index,
            # The host is ours: what the GPU refuses is decoded as all others are
            backends=[
                self._library.Backend(kind)
                for kind in (kinds.HW_GPU_ONLY, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU)
            ],
            # Colours are smoothed as libjpeg does
            options=":fancy_upsampling=1",
        )
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        data = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
        with self.at_work():
            if self.decode([JpegPart(memoryview(data), Box(0, 0, 16, 16))], 3) == [None]:
                raise _missing("nvImageCodec decodes no JPEG here, for want of nvJPEG")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with self._lock, torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def decode(self, parts: Sequence[JpegPart], channels: int) -> list[Tensor | None]:
        library = self._library
        colours = library.ColorSpec.GRAY if channels == 1 else library.ColorSpec.SRGB
        how = library.DecodeParams(apply_exif_orientation=False, color_spec=colours)
        # Of what is None there, None comes back
        pictures = self._decoder.decode(
            [self._open(part) for part in parts], params=how, cuda_stream=self._stream.cuda_stream
        )
        return [None if picture is None else from_dlpack(picture) for picture in pictures]

    def _open(self, part: JpegPart) -> object | None:
        top, left, height, width = part.box
        region = self._library.Region(top, left, top + height, left + width)
        try:
            stream = self._library.CodeStream(np.frombuffer(part.data, np.uint8))
            opened: object = stream.get_sub_code_stream(region=region)
        except Exception:
            # Of a header that it does not take it raises what it likes; the host looks at it next
            return None
        return opened


class _Planned(NamedTuple):
    """What is shown of a picture that the device decodes."""

    part: JpegPart
    size: Size
    view: PictureView


class PicturesOnDevice:
    """A field's pictures of a batch: planned row by row, on any thread, then decoded at once.

    Args:
        kind: The field.
        num_rows: Of the batch.
        size: Delivered.
    """

    def __init__(self, kind: Image, num_rows: int, size: Size) -> None:
        self._kind = kind
        self.shape = (*size, kind.channels)
        self._rows: list[_Planned | Pixels | None] = [None] * num_rows
        self._refused: set[int] = set()

    def plan(self, row: int, data: memoryview, draws: Draws, *, where: str) -> Size | None:
        """Choose what is shown of a picture, if the device may decode it.

        Returns:
            The picture's height and width; None: the host has to decode it, and `keep` it.

        Raises:
            FieldError: If it does not fit the crop.
        """
        kind = self._kind
        if row in self._refused:
            return None
        found = find_jpeg_view(data, self.shape[:2], kind, draws, where=where)
        if found is None:
            return None
        size, view = found
        box = Box(0, 0, *size)
        if view.resized == size:
            box = intersection(view.box, box)
        elif math.prod(view.resized) > MOST_RESIZED * math.prod(view.out):
            return None
        if not (box.height and box.width):
            return None
        self._rows[row] = _Planned(JpegPart(data, box), size, view)
        return size

    def keep(self, row: int, pixels: Pixels) -> None:
        """Take what the host has decoded: uint8[height, width, channels]."""
        self._rows[row] = pixels

    def deliver(self, decoder: DeviceDecoder, decode_again: Callable[[int], object]) -> Tensor:
        """Decode all rows that were planned.

        Args:
            decoder: Of the device.
            decode_again: Called with a row that the device refused: plans it, which is in vain, and
                has the host decode it.

        Returns:
            uint8[batch, channels, height, width], channels last in memory, on the device; zeros
            where a row was refused.
        """
        planned = [
            (row, found) for row, found in enumerate(self._rows) if isinstance(found, _Planned)
        ]
        with decoder.at_work():
            shape = (len(self._rows), *self.shape)
            out = torch.zeros(shape, dtype=torch.uint8, device=decoder.device)
            parts = [found.part for _, found in planned]
            pictures = decoder.decode(parts, self._kind.channels) if parts else []
            for (row, found), pixels in zip(planned, pictures, strict=True):
                if pixels is None:
                    self._rows[row] = None
                    self._refused.add(row)
                    decode_again(row)
                else:
                    out[row] = _shown(pixels, found, self._kind.fill)
            for row, kept in enumerate(self._rows):
                if isinstance(kept, np.ndarray):
                    out[row] = torch.from_numpy(kept).to(decoder.device)
        return out.permute(0, 3, 1, 2)


def _shown(pixels: Tensor, found: _Planned, fill: int) -> Tensor:
    """Resize and cut what was decoded, as `dataio.rows.decode.store` does on the host."""
    view = found.view
    inside = intersection(view.box, Box(0, 0, *view.resized))
    if view.resized != found.size:
        pixels = _resized(pixels, view.resized)[slices(inside)]
    if inside != view.box:
        padded = pixels.new_full((*view.out, pixels.shape[2]), fill)
        place = Box(inside.top - view.box.top, inside.left - view.box.left, *inside[2:])
        padded[slices(place)] = pixels
        pixels = padded
    pixels = _resized(pixels, view.out)
    return pixels.flip(1) if view.flipped else pixels


def _resized(pixels: Tensor, size: Size) -> Tensor:
    if pixels.shape[:2] == size:
        return pixels
    # On a GPU torch resizes floating numbers alone
    planes = pixels.permute(2, 0, 1)[None].float()
    planes = interpolate(planes, size, mode="bilinear", antialias=True)
    return planes[0].permute(1, 2, 0).round_().clamp_(0, 255).to(torch.uint8)
