"""What is delivered of a picture: boxes inside of it, of the distribution that was asked for."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.base.seeding import key, uniform
from dataio.rows.image import Image, Mask
from dataio.rows.views import (
    MIDDLE,
    NUM_DRAWS,
    Box,
    CenterCrop,
    Pad,
    PictureView,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ResizeLong,
    ResizeShort,
    find_view,
)

SIZES = st.tuples(st.integers(1, 3000), st.integers(1, 3000))
DRAWS = st.integers(0, 2**40).map(
    lambda number: uniform(key(0, "test"), [number], NUM_DRAWS)[0].tolist()
)


def test_no_box_of_a_line_of_pixels_is_empty() -> None:
    flat = RandomResizedCrop(4, scale=(1, 1), ratio=(2.5, 2.6))
    tall = RandomResizedCrop(4, scale=(1, 1), ratio=(0.1, 0.2))
    assert flat.box((9, 1), [0.5] * NUM_DRAWS) == (4, 0, 1, 1)
    assert tall.box((1, 2), [0.5] * NUM_DRAWS) == (0, 0, 1, 1)


def boxes(crop: RandomResizedCrop, size: tuple[int, int], count: int) -> np.ndarray:
    draws = uniform(key(0, "pictures", epoch=3), np.arange(count), NUM_DRAWS).tolist()
    return np.array([crop.box(size, row) for row in draws])


def test_numbers_are_uniform_and_of_each_sample_alone() -> None:
    stream = key(7, "pictures", epoch=1)
    drawn = uniform(stream, np.arange(20_000), 5)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, 20, (0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 44  # chi-square of 19, one in a thousand
    assert abs(np.corrcoef(drawn.T) - np.eye(5)).max() < 0.04
    assert (uniform(stream, [19, 3], 5) == drawn[[19, 3]]).all()
    assert (uniform(stream, [3], 4) == drawn[[3], :4]).all()
    assert (uniform(key(7, "pictures", epoch=2), [3], 5) != drawn[3]).all()


@given(SIZES, SIZES, DRAWS)
def test_a_random_box_lies_in_the_picture(size, out, draws) -> None:
    crop = RandomResizedCrop(out)
    box = crop.box(size, draws)
    assert box.top >= 0
    assert box.left >= 0
    assert 1 <= box.height <= size[0] - box.top
    assert 1 <= box.width <= size[1] - box.left
    assert find_view(size, None, crop, 0, draws) == PictureView(size, box, out, False)


def test_area_and_proportions_of_boxes_are_as_asked() -> None:
    scale, ratio = (0.1, 0.4), (0.5, 2.0)
    found = boxes(RandomResizedCrop(500, scale=scale, ratio=ratio), (500, 500), 20_000)
    area = found[:, 2] * found[:, 3] / 250_000
    proportions = np.log(found[:, 3] / found[:, 2])
    # All of them fit at once, so both are uniform but for the rounding of sides.
    for values, low, high in (
        (area, *scale),
        (proportions, math.log(ratio[0]), math.log(ratio[1])),
    ):
        counts = np.histogram(values, 10, (low, high))[0]
        assert abs(counts - 2000).max() < 5 * math.sqrt(2000)
        assert abs(values.mean() - (low + high) / 2) < 5 * (high - low) / math.sqrt(12 * 20_000)
    # A box is as likely at every place that it fits.
    for start, side in ((0, 2), (1, 3)):
        room = (found[:, start] + 0.5) / (501 - found[:, side])
        assert abs(np.histogram(room, 10, (0, 1))[0] - 2000).max() < 5 * math.sqrt(2000)


def test_boxes_are_distributed_as_those_of_torchvision() -> None:
    import torch

    try:
        from torchvision.transforms import v2 as transforms
    except (ImportError, RuntimeError) as error:  # its wheel is made for another build of torch
        pytest.skip(f"torchvision does not load: {error}")
    torch.manual_seed(0)
    theirs = transforms.RandomResizedCrop(224)
    picture = torch.zeros(1, 400, 500)
    drawn = [theirs.make_params([picture]) for _ in range(8000)]
    other = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in drawn])
    found = boxes(RandomResizedCrop(224), (400, 500), 8000)
    for ours, of_torchvision in zip(found.T, other.T, strict=True):
        both = np.sort(np.concatenate([ours, of_torchvision]))
        gap = (
            np.abs(
                np.searchsorted(np.sort(ours), both, "right")
                - np.searchsorted(np.sort(of_torchvision), both, "right")
            ).max()
            / 8000
        )
        assert gap < 1.95 * math.sqrt(2 / 8000)  # Kolmogorov-Smirnov, one in a thousand


def test_a_picture_of_extreme_proportions_gives_its_middle() -> None:
    crop = RandomResizedCrop(10, scale=(1.0, 1.0))
    assert crop.box((30, 300), MIDDLE) == Box(0, 130, 30, 40)
    assert crop.box((300, 30), MIDDLE) == Box(130, 0, 40, 30)


def test_boxes_of_large_pictures_lie_on_the_decoders_grid() -> None:
    found = boxes(RandomResizedCrop(224), (2000, 3000), 500)
    for box in found:
        scale = max(s for s in (1, 2, 4, 8) if min(box[2:]) >= 224 * s)
        assert (box % scale == 0).all()
    assert len({int(box[0]) % 8 for box in found}) > 1


@pytest.mark.parametrize("size", [(400, 500), (500, 400), (333, 1000), (224, 224), (7, 3)])
def test_resizing_keeps_proportions(size: tuple[int, int]) -> None:
    short, long = ResizeShort(256).resized(size), ResizeLong(256).resized(size)
    assert min(short) == max(long) == 256
    for height, width in (short, long):
        assert abs(height * size[1] - width * size[0]) < max(size)
    assert Resize((3, 4)).resized(size) == (3, 4)


def test_crops_and_padding_lie_in_the_middle() -> None:
    assert CenterCrop(224).box((256, 320), MIDDLE) == Box(16, 48, 224, 224)
    assert CenterCrop((2, 3)).box((3, 3), MIDDLE) == Box(0, 0, 2, 3)
    assert Pad(10).box((4, 7), MIDDLE) == Box(-3, -1, 10, 10)


def test_a_random_crop_reaches_every_place() -> None:
    draws = uniform(key(0, "x"), np.arange(3000), NUM_DRAWS).tolist()
    places = {RandomCrop(4, padding=2).box((6, 5), row)[:2] for row in draws}
    assert places == {(top, left) for top in range(-2, 5) for left in range(-2, 4)}


def test_flips_come_as_often_as_asked() -> None:
    draws = uniform(key(0, "x"), np.arange(10_000), NUM_DRAWS).tolist()
    flipped = sum(find_view((5, 5), None, None, 0.3, row).flipped for row in draws)  # type: ignore[union-attr]
    assert abs(flipped - 3000) < 5 * math.sqrt(2100)
    assert not any(find_view((5, 5), None, None, 0.0, row).flipped for row in draws)  # type: ignore[union-attr]
    assert all(find_view((5, 5), None, None, 1.0, row).flipped for row in draws)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: Resize(0), "Resize: size is 0, expected a whole number >= 1 or a tuple"),
        (lambda: RandomResizedCrop(8, scale=(0.5, 0.1)), "scale is .*the smaller first"),
        (lambda: RandomResizedCrop(8, scale=(0.0, 0.1)), "scale is .*must be two fractions"),
        (lambda: RandomResizedCrop(8, ratio=(2.0, 1.0)), "ratio is .*the smaller first"),
        (lambda: RandomCrop(8, padding=-1), "padding is -1, expected a whole number >= 0"),
        (lambda: Image("jpg", flip=1.5), r"Image: flip is 1.5, expected a number in \[0, 1\]"),
        (lambda: Mask("png", fill=256), r"fill is 256, expected a whole number in \[0, 255\]"),
        (
            lambda: Image("jpg", resize=ResizeShort(256)),
            r"leaves pictures of different sizes, .*add crop=CenterCrop\(256\)",
        ),
        (
            lambda: Image("jpg", resize=Resize(100), crop=CenterCrop(224)),
            r"the picture is 100 x 100 .*smaller than CenterCrop\(size=224\)",
        ),
        (lambda: Image("jpg", crop=RandomResizedCrop(8), decoded=True), "decoded without one size"),
    ],
)
def test_a_wrong_declaration_is_refused(declare, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        declare()
