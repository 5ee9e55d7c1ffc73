"""Pictures as fields: what part of them is delivered, and at what size."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

import numpy as np

from dataio.base.checked import Fraction, Range, checked
from dataio.rows.encoding import Raw, Stored, as_bytes, check_key, compress
from dataio.rows.rows import FixedColumn
from dataio.rows.views import MIDDLE, Crop, Resizing, Size, find_view, out_size

Level = Annotated[int, Range(0, 255)]
"""Of a byte's levels."""


@checked
@dataclass(frozen=True)
class Image:
    """A picture, kept compressed, delivered as uint8[batch, channels, height, width].

    First it is resized, then cropped, then flipped. Of a JPEG only the region and the scale that
    the crop needs are decoded. All fields of a sample draw the same numbers, which follow from the
    run's seed, the epoch and the sample alone: a `Mask` with the same ``resize``, ``crop`` and
    ``flip`` is cut where its image is. Pixels (uint8[height, width] or [height, width, channels])
    are taken too, and kept as a PNG.

    Attributes:
        key: Extension or column.
        resize: Brings the picture to another size, with antialiasing: `Resize`, `ResizeShort` or
            `ResizeLong`.
        crop: What is then cut out of it: `RandomResizedCrop`, `RandomCrop`, `CenterCrop` or `Pad`.
            Where neither gives a size, every picture must have the same.
        flip: Probability that left and right change places.
        channels: 1 (gray), 3 (RGB) or 4 (RGBA).
        fill: Value of what a crop shows beyond the picture's edges.
        upright: Turn the picture as its metadata say, EXIF or XMP.
        decoded: Decode while staging and keep the pixels: more bytes in the cache, no decoding
            while training. ``resize``, and a crop that draws nothing, are done once; a random crop
            and the flip anew each time. Needs one size to keep. ``"auto"``: of each picture keep
            its pixels, whole, where they are at most 4 times its compressed bytes.
        decode: ``"device"``: JPEGs are decoded, resized and flipped by the GPU that batches are
            delivered to; boxes and flips are the same.
    """

    key: str
    _: KW_ONLY
    resize: Resizing | None = None
    crop: Crop | None = None
    flip: Fraction = 0.0
    channels: int = 3
    fill: Level = 0
    upright: bool = True
    decoded: bool | Literal["auto"] = False
    decode: Literal["host", "device"] = "host"

    classes = False

    def __post_init__(self) -> None:
        _check(self)
        if self.channels not in (1, 3, 4):
            raise ValueError(f"Image({self.key!r}): channels is {self.channels}, must be 1, 3 or 4")
        if self.decode == "device" and (self.decoded or self.channels == 4):
            found = f"decoded={self.decoded!r}" if self.decoded else "channels=4"
            raise ValueError(
                f'Image({self.key!r}): decode="device" and {found} exclude one another: a GPU '
                'decodes gray and colours, for each batch; give decode="host"'
            )
        if self.decoded == "auto" and self.channels == 4:
            raise ValueError(
                f'Image({self.key!r}): decoded="auto" keeps gray and colours, found channels=4; '
                "leave it out, or give decoded=True and one size"
            )
        if self.decoded is True and self.kept is None:
            raise ValueError(
                f"Image({self.key!r}): decoded without one size, must have the size that all "
                "images are kept in: Image(..., resize=Resize(224), decoded=True)"
            )

    @property
    def DELIVERED(self) -> tuple[str, ...]:
        """What decides only how the field is delivered."""
        if self.decoded == "auto":
            return ("flip", "fill", "decode")
        if not self.decoded:
            return ("resize", "crop", "flip", "channels", "fill", "upright", "decode")
        return ("crop", "flip", "decode") if self.draws_crop else ("flip", "decode")

    @property
    def draws_crop(self) -> bool:
        """Whether the crop differs from epoch to epoch."""
        return self.crop is not None and self.crop.random

    @property
    def draws(self) -> bool:
        """Whether deliveries differ from epoch to epoch."""
        return self.draws_crop or self.flip > 0

    @property
    def kept(self) -> Size | None:
        """The size of the pixels that ``decoded`` keeps."""
        return out_size(self.resize, None if self.draws_crop else self.crop)

    @property
    def out(self) -> Size | None:
        """The size delivered; None where it is that of the pictures."""
        return out_size(self.resize, self.crop)

    @property
    def once(self) -> "Image":
        """What ``decoded`` does while staging."""
        return Image(
            self.key, resize=self.resize, crop=None if self.draws_crop else self.crop,
            channels=self.channels, fill=self.fill, upright=self.upright,
        )  # fmt: skip

    @property
    def anew(self) -> "Image":
        """What is then left for each delivery of the pixels that were kept."""
        return Image(
            self.key, crop=self.crop if self.draws_crop else None, flip=self.flip,
            channels=self.channels, fill=self.fill,
        )  # fmt: skip

    def column(self, name: str) -> FixedColumn | None:
        return FixedColumn(name, "|u1", self._shape()) if self.decoded is True else None

    def encode(self, raw: Raw, where: str) -> Stored:
        # Its libraries are not needed by those who only name fields.
        from dataio.rows.decode import decode_image, store_pixels

        is_kept = self.decoded is True
        if is_kept and isinstance(raw, np.ndarray) and raw.shape[2:] == (self.channels,):
            pixels = raw.astype(np.uint8, copy=False)
            if raw.dtype == np.uint8:
                out = np.empty(self._shape(), np.uint8)
                store_pixels(pixels, out, self.once, where=where)
                return out.tobytes()
        data = as_bytes(
            self, compress(self, raw, where) if isinstance(raw, np.ndarray) else raw, where
        )
        if not is_kept:
            return data
        out = np.empty(self._shape(), np.uint8)
        decode_image(memoryview(data), out, self.once, where=where)
        return out.tobytes()

    def _shape(self) -> tuple[int, int, int]:
        assert self.kept is not None
        return *self.kept, self.channels


@checked
@dataclass(frozen=True)
class Mask:
    """A picture of class numbers, kept compressed, delivered as uint8[batch, height, width].

    A gray or an indexed PNG: of an indexed one the index is delivered, not its colour; other gray
    pictures are taken at their word, colours are refused. Resized to the nearest pixel, so that no
    class is invented. With the ``resize``, ``crop`` and ``flip`` of an `Image` of the same size it
    is cut where that is.

    Attributes:
        key: Extension or column.
        resize: As of `Image`.
        crop: As of `Image`.
        flip: As of `Image`.
        fill: Class of what a crop shows beyond the picture's edges.
        upright: As of `Image`.
    """

    DELIVERED = ("resize", "crop", "flip", "fill", "upright")

    key: str
    _: KW_ONLY
    resize: Resizing | None = None
    crop: Crop | None = None
    flip: Fraction = 0.0
    fill: Level = 255
    upright: bool = True

    channels = 1
    classes = True

    def __post_init__(self) -> None:
        _check(self)

    @property
    def out(self) -> Size | None:
        """The size delivered; None where it is that of the pictures."""
        return out_size(self.resize, self.crop)

    @property
    def draws(self) -> bool:
        """Whether deliveries differ from epoch to epoch."""
        return self.flip > 0 or (self.crop is not None and self.crop.random)

    def column(self, name: str) -> None:
        return None

    def encode(self, raw: Raw, where: str) -> Stored:
        if isinstance(raw, np.ndarray):
            raw = compress(self, raw.view(np.uint8) if raw.dtype == np.bool_ else raw, where)
        return as_bytes(self, raw, where)


@checked
@dataclass(frozen=True)
class ImageSize:
    """A picture's own height and width, delivered as int64[batch, 2]; read while staging.

    Attributes:
        key: Extension or column of the picture.
        upright: As it is seen, as its metadata say, not as it is stored.
    """

    key: str
    _: KW_ONLY
    upright: bool = True

    def __post_init__(self) -> None:
        check_key(self)

    def column(self, name: str) -> FixedColumn:
        return FixedColumn(name, "<i8", (2,))

    def encode(self, raw: Raw, where: str) -> Stored:
        from dataio.rows.decode import image_shape

        if isinstance(raw, np.ndarray) and raw.ndim > 1:
            size = raw.shape[0], raw.shape[1]
        else:
            data = memoryview(as_bytes(self, raw, where))
            size = image_shape(data, where=where, upright=self.upright)
        return np.array(size, "<i8").tobytes()


def _check(field: Image | Mask) -> None:
    check_key(field)
    kind = f"{type(field).__name__}({field.key!r})"
    if field.resize is not None and field.out is None:
        raise ValueError(
            f"{kind}: {field.resize} leaves pictures of different sizes, expected one; add "
            f"crop=CenterCrop({field.resize.size}) or crop=Pad({field.resize.size})"
        )
    if field.resize is not None and field.crop is not None and field.resize.fixed is not None:
        # Of one size, so what does not fit is known now.
        view = find_view(field.resize.fixed, None, field.crop, 0.0, MIDDLE)
        if isinstance(view, str):
            raise ValueError(f"{kind}: {field.resize}, then {field.crop}: {view}")
