"""What part of a picture is delivered, and at what size: arithmetic on heights and widths. Pure.

`Image` and `Mask` take these. Sizes are heights and widths; one number stands for both.
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from dataio.base.checked import Count, Whole, checked

Size = tuple[int, int]
"""Height and width, in pixels."""

Sides = Count | tuple[Count, Count]
"""The same as it is given."""

Draws = list[float]
"""Numbers in [0, 1) for one sample, the same for all fields of it; see `NUM_DRAWS`."""

ATTEMPTS = 10
NUM_DRAWS = 4 * ATTEMPTS + 1
"""Four for each attempt at a box, then one for the flip."""


MIDDLE: Draws = [0.5] * NUM_DRAWS
"""The numbers of a sample where nothing is drawn: no flip, and boxes in the middle."""

SCALES = (8, 4, 2)
"""What JPEG decoders divide heights and widths by at no cost."""


class Box(NamedTuple):
    """A rectangle of a picture, in pixels; what lies outside of the picture is filled."""

    top: int
    left: int
    height: int
    width: int


def _pair(size: int | Size) -> Size:
    return (size, size) if isinstance(size, int) else size


@checked
@dataclass(frozen=True)
class Resize:
    """Resize a picture to one size, whatever its proportions: they change."""

    size: Sides

    def resized(self, size: Size) -> Size:
        """The size of a picture of this size afterwards."""
        return self.fixed

    @property
    def fixed(self) -> Size:
        """The size of every picture afterwards."""
        return _pair(self.size)


@checked
@dataclass(frozen=True)
class ResizeShort:
    """Resize a picture so that its shorter side has this many pixels; proportions stay."""

    size: Count

    def resized(self, size: Size) -> Size:
        """The size of a picture of this size afterwards; the longer side is rounded down."""
        height, width = size
        if height <= width:
            return self.size, self.size * width // height
        return self.size * height // width, self.size

    fixed = None


@checked
@dataclass(frozen=True)
class ResizeLong:
    """Resize a picture so that its longer side has this many pixels; proportions stay."""

    size: Count

    def resized(self, size: Size) -> Size:
        """The size of a picture of this size afterwards; the shorter side is rounded down."""
        height, width = size
        if height >= width:
            return self.size, max(self.size * width // height, 1)
        return max(self.size * height // width, 1), self.size

    fixed = None


@checked
@dataclass(frozen=True)
class CenterCrop:
    """Cut this size out of the middle. A smaller picture is an error."""

    size: Sides

    random = False

    @property
    def out(self) -> Size:
        """The size delivered."""
        return _pair(self.size)

    def box(self, size: Size, draws: Draws) -> Box:
        """Choose the box of a picture of this size."""
        height, width = self.out
        # Python rounds halves to even, as torchvision does.
        return Box(round((size[0] - height) / 2), round((size[1] - width) / 2), height, width)


@checked
@dataclass(frozen=True)
class RandomCrop:
    """Cut this size out of a random place.

    Attributes:
        size: Of the box.
        padding: Pixels of `fill` that are put around the picture first. A picture that is smaller
            even then is an error.
    """

    size: Sides
    _: KW_ONLY
    padding: Whole = 0

    random = True

    @property
    def out(self) -> Size:
        """The size delivered."""
        return _pair(self.size)

    def box(self, size: Size, draws: Draws) -> Box:
        """Choose the box of a picture of this size."""
        height, width = self.out
        down, right = (
            side + 2 * self.padding - cut for side, cut in zip(size, self.out, strict=True)
        )
        return Box(
            _whole(draws[0], max(down, 0)) - self.padding,
            _whole(draws[1], max(right, 0)) - self.padding,
            height,
            width,
        )


@checked
@dataclass(frozen=True)
class RandomResizedCrop:
    """Cut a box of random area and proportions out of a random place, and resize it.

    The area is uniform in ``scale`` times the picture's, the logarithm of width / height uniform
    in that of ``ratio``. A box that does not fit is drawn anew, ten times at most; then the middle
    of the picture is taken, in the proportions nearest to its own. A box that is more than twice
    the size delivered begins and ends at multiples of 2, 4 or 8 pixels, so that a JPEG is decoded
    at a half, a quarter or an eighth of its size.

    Attributes:
        size: Delivered.
        scale: Bounds of the area, as fractions of the picture's, in (0, 1].
        ratio: Bounds of width / height.

    Source: Szegedy et al., Going deeper with convolutions, CVPR 2015, section 6; the numbers and
    the last resort are those of torchvision's transform of this name.
    """

    size: Sides
    _: KW_ONLY
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    random = True

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(
                f"RandomResizedCrop: scale is {self.scale}, must be two fractions of the picture's "
                "area, the smaller first, such as (0.08, 1.0)"
            )
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise ValueError(
                f"RandomResizedCrop: ratio is {self.ratio}, must be two values of width / height, "
                "the smaller first, such as (3 / 4, 4 / 3)"
            )

    @property
    def out(self) -> Size:
        """The size delivered."""
        return _pair(self.size)

    def box(self, size: Size, draws: Draws) -> Box:
        """Choose the box of a picture of this size."""
        height, width = size
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for attempt in range(0, 4 * ATTEMPTS, 4):
            area, proportions, down, right = draws[attempt : attempt + 4]
            pixels = height * width * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
            ratio = math.exp(low + proportions * (high - low))
            tall, wide = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
            if 0 < tall <= height and 0 < wide <= width:
                box = Box(_whole(down, height - tall), _whole(right, width - wide), tall, wide)
                return _snapped(box, self.out)
        tall, wide = height, width
        if width / height < self.ratio[0]:
            tall = min(max(round(width / self.ratio[0]), 1), height)
        elif width / height > self.ratio[1]:
            wide = min(max(round(height * self.ratio[1]), 1), width)
        return _snapped(Box((height - tall) // 2, (width - wide) // 2, tall, wide), self.out)


@checked
@dataclass(frozen=True)
class Pad:
    """Put a picture in the middle of this size. A larger picture is an error."""

    size: Sides

    random = False

    @property
    def out(self) -> Size:
        """The size delivered."""
        return _pair(self.size)

    def box(self, size: Size, draws: Draws) -> Box:
        """Choose the box of a picture of this size."""
        height, width = self.out
        return Box(-((height - size[0]) // 2), -((width - size[1]) // 2), height, width)


Resizing = Resize | ResizeShort | ResizeLong
Crop = CenterCrop | RandomCrop | RandomResizedCrop | Pad


class PictureView(NamedTuple):
    """What is delivered of one picture.

    Attributes:
        resized: The size that the picture is brought to first; its own where nothing resizes it.
        box: What is then cut out of it.
        out: The size that the box is brought to.
        flipped: Whether left and right change places at the end.
    """

    resized: Size
    box: Box
    out: Size
    flipped: bool


def find_view(
    size: Size, resize: Resizing | None, crop: Crop | None, flip: float, draws: Draws
) -> PictureView | str:
    """Decide what is delivered of a picture.

    Args:
        size: The picture's.
        resize: What comes first.
        crop: What comes then.
        flip: Probability that left and right change places.
        draws: Numbers of this sample.

    Returns:
        The view; or, where the picture does not fit the crop, what is wrong and the cure.
    """
    resized = resize.resized(size) if resize is not None else size
    flipped = draws[-1] < flip
    if crop is None:
        return PictureView(resized, Box(0, 0, *resized), resized, flipped)
    found = f"the picture is {resized[0]} x {resized[1]} (height x width)" + (
        f" after {resize}" if resize is not None else ""
    )
    room = 2 * crop.padding if isinstance(crop, RandomCrop) else 0
    if isinstance(crop, Pad):
        if resized[0] > crop.out[0] or resized[1] > crop.out[1]:
            return f"{found}, larger than {crop}; put resize=ResizeLong({min(crop.out)}) before it"
    elif not isinstance(crop, RandomResizedCrop) and (
        resized[0] + room < crop.out[0] or resized[1] + room < crop.out[1]
    ):
        return (
            f"{found}, smaller than {crop}; put resize=ResizeShort({max(crop.out)}) before it, "
            "or crop=Pad(...) in its place"
        )
    return PictureView(resized, crop.box(resized, draws), crop.out, flipped)


def out_size(resize: Resizing | None, crop: Crop | None) -> Size | None:
    """Give the size of everything delivered, or None where each picture has its own."""
    if crop is not None:
        return crop.out
    return resize.fixed if resize is not None else None


def find_scale(box: Box, out: Size) -> int:
    """Choose by what a picture may be divided while it is decoded: to no less than is needed."""
    fits = (s for s in SCALES if box.height >= out[0] * s and box.width >= out[1] * s)
    return next(fits, 1)


def _snapped(box: Box, out: Size) -> Box:
    scale = find_scale(box, out)
    return Box(*(side - side % scale for side in box))


def _whole(draw: float, most: int) -> int:
    """Turn a number in [0, 1) into a whole one in [0, most], each as likely."""
    return min(int(draw * (most + 1)), most)
