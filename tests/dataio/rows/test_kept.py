"""Pictures kept as pixels are delivered as those that are decoded for each batch."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

import shuffle
from dataio import (
    CenterCrop,
    Image,
    Int,
    Loader,
    NodeCache,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    Workers,
)  # fmt: skip
from dataio.base.errors import FieldError
from dataio.rows.decode import PIXELS, decode_image
from dataio.rows.kept import MOST_TIMES, keep_pixels
from dataio.rows.rows import Rows, RowSchema, make_rows
from dataio.world.threads import run_threads, thread_worlds
from tests.dataio.rows.test_at_once import deliver, drawn_kind, draws_of, pixels_of

SCHEMA = RowSchema((), ("x",))


def rows_of(pictures: list[bytes]) -> Rows:
    data = np.frombuffer(b"".join(pictures), np.uint8)
    lengths = np.array([[len(each)] for each in pictures], np.int64)
    return make_rows(SCHEMA, np.arange(len(pictures)), [], lengths, [data])


def kept(kind: Image, picture: bytes, *, refused: bool = False) -> bytes:
    rows = rows_of([picture])
    made = keep_pixels(rows, {"x": replace(kind, decoded="auto")}, {0: [0]} if refused else {})
    assert made.lengths[0, 0] == len(made.variable[0])
    return made.variable[0].tobytes()


def saved(pixels: np.ndarray, form: str, *, mode: str = "RGB", **options) -> bytes:
    file = io.BytesIO()
    Pillow.fromarray(pixels).convert(mode).save(file, form, **options)
    return file.getvalue()


def drawn_picture(rng) -> bytes:
    pixels = pixels_of(rng, *rng.integers(1, 90 if rng.random() < 0.7 else 400, 2).tolist())
    form = ("JPEG", "JPEG", "JPEG", "PNG", "WEBP", "BMP", "PPM")[rng.integers(7)]
    modes = {"PNG": ("RGB", "L", "RGBA", "P", "LA", "1"), "JPEG": ("RGB", "RGB", "L", "CMYK")}
    mode = str(rng.choice(modes.get(form, ("RGB",))))
    exif = Pillow.Exif()
    exif[274] = int(rng.integers(1, 9))
    options: dict[str, object] = {"exif": exif} if form != "PPM" and rng.random() < 0.2 else {}
    if form == "JPEG":
        options |= {"quality": int(rng.integers(50, 100)), "progressive": rng.random() < 0.2}
        if mode == "RGB":
            options["subsampling"] = int(rng.integers(3))
    return saved(pixels, form, mode=mode, **options)


@pytest.mark.parametrize("first", range(0, 1200, 300))
def test_any_way_to_deliver_a_picture_gives_the_same_bytes(first) -> None:
    num_kept = num_at_once = 0
    for seed in range(first, first + 300):
        rng = np.random.default_rng(seed)
        kind, (drawn, draws) = drawn_kind(rng), draws_of(rng)
        try:
            data = drawn_picture(rng)
        except OSError:
            continue  # Pillow's encoder has too little room for a tiny picture
        if kind is None or kind.channels == 4:
            continue
        mine = kept(kind, data)
        if mine == data:
            continue
        assert len(mine) <= MOST_TIMES * len(data)
        num_kept += 1
        found, wanted = (seen_of(picture, kind, draws) for picture in (mine, data))
        assert np.array_equal(found, wanted), (seed, kind)
        if isinstance(found, str):
            continue
        at_once, states, sizes = deliver(kind, [mine], drawn, out=found.shape[:2])
        if states == [0]:
            num_at_once += 1
            assert np.array_equal(at_once[0], wanted), (seed, kind)
            header = PIXELS.match(mine)
            assert header is not None
            assert sizes == [[int(header[3]), int(header[2])]]
    assert num_kept > 60
    assert num_at_once > 30


def seen_of(picture: bytes, kind: Image, draws: list[float]) -> np.ndarray | str:
    """Pixels, or why there are none."""
    with Pillow.open(io.BytesIO(picture)) as opened:
        lies = kind.upright and opened.getexif().get(274, 1) > 4
        size = opened.size if lies else opened.size[::-1]
    out = kind.out or (kind.resize.resized(size) if kind.resize else size)
    pixels = np.zeros((*out, kind.channels), np.uint8)
    try:
        assert decode_image(memoryview(picture), pixels, kind, draws, where="here") == size
    except FieldError as error:
        return str(error)
    return pixels


RNG = np.random.default_rng(0)
SMALL = saved(pixels_of(RNG, 32, 32), "JPEG")
LARGE = saved(pixels_of(RNG, 300, 400), "JPEG", quality=50)


@pytest.mark.parametrize(
    ("kind", "picture", "is_kept"),
    [
        (Image("x"), SMALL, True),
        (Image("x", crop=RandomCrop(32, padding=4), flip=0.5), SMALL, True),
        (Image("x", channels=1), SMALL, True),
        (Image("x", resize=Resize(17)), SMALL, True),
        # A JPEG of twice the size is decoded smaller, which gives other pixels
        (Image("x", resize=Resize(16)), SMALL, False),
        (Image("x", crop=RandomResizedCrop(16)), SMALL, False),
        (Image("x"), LARGE, False),
        # What finds no end, or may be damaged, is for others to see
        (Image("x"), SMALL[:-2] + bytes(2), False),
        (Image("x"), SMALL[:200], False),
        (Image("x"), b"", False),
        (Image("x"), b"no picture", False),
    ],
)
def test_pictures_are_kept_as_pixels_where_these_are_few(kind, picture, is_kept) -> None:
    assert (kept(kind, picture) != picture) == is_kept
    assert kept(kind, picture, refused=True) == picture


def test_a_header_that_lies_is_no_picture_of_pixels() -> None:
    pixels = bytes(range(12))
    good = b"P6\n2 2\n255\n" + pixels
    seen, states, _ = deliver(Image("x"), [good], out=(2, 2))
    assert states == [0]
    assert seen.tobytes() == pixels
    lies = [
        b"P6\n2 2\n255\n" + pixels[:-1], good + b"\0", b"P6\n2 3\n255\n" + pixels,
        b"P5\n2 2\n255\n" + pixels, b"P6\n2 2\n254\n" + pixels, b"P6\n 2 2\n255\n" + pixels,
        b"P6\n2  2\n255\n" + pixels, b"P6\n0 2\n255\n", b"P6\n2 2\n255", b"P6\n2", b"P6\n",
        b"P6\n000002 2\n255\n" + pixels, b"P6\n99999 99999\n255\n" + pixels,
    ]  # fmt: skip
    assert deliver(Image("x"), lies, out=(2, 2))[1] == [1] * len(lies)


IMAGE = Image("img", crop=RandomCrop(32, padding=4), flip=0.5)


@pytest.fixture
def source(tmp_path: Path) -> str:
    rng = np.random.default_rng(1)
    pictures = [saved(pixels_of(rng, 32, 32), "PNG" if n % 3 else "JPEG") for n in range(60)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"img": pictures, "cls": list(range(60))}), path)
    return str(path)


def trained(source: str, cache: object, decoded: Any, **options) -> dict[int, bytes]:
    fields = {"image": replace(IMAGE, decoded=decoded), "label": Int("cls")}
    seen = {}
    with Loader(source, fields=fields, cache=cache, batch_size=5, **options) as loader:  # type: ignore[arg-type]
        for epoch in loader.epochs(3):
            for batch in loader:
                for label, image in zip(batch["label"], batch["image"], strict=True):
                    seen[epoch * 100 + int(label)] = image.numpy().tobytes()
    return seen


def halves(world, source: str, directory: Path, decoded: Any) -> dict[int, bytes]:
    return trained(
        source, directory / str(world.node), decoded, world=world, shuffle=shuffle.Partial(0.5)
    )


def test_batches_are_the_same(source, tmp_path) -> None:
    wanted = trained(source, tmp_path / "0", False)
    assert len(wanted) == 180
    assert trained(source, tmp_path / "1", "auto") == wanted
    assert any(b"P6\n32 32\n255\n" in p.read_bytes() for p in (tmp_path / "1").rglob("*heap*"))
    assert trained(source, tmp_path / "1", "auto", workers=Workers(processes=1)) == wanted
    # Another way to keep them is another cache's
    assert trained(source, tmp_path / "1", False) == wanted
    quota = NodeCache(tmp_path / "2", quota=150_000)
    assert trained(source, quota, "auto") == wanted
    assert sum(p.stat().st_blocks * 512 for p in (tmp_path / "2").rglob("*")) <= 150_000
    both: dict[int, bytes] = {}
    for part in run_threads(
        thread_worlds([1, 1], timeout_s=60), lambda world: halves(world, source, tmp_path, "auto")
    ):
        both |= part
    assert both == wanted


def test_a_row_that_was_damaged_is_read_again(source, tmp_path) -> None:
    wanted = trained(source, tmp_path / "0", "auto")
    (heap,) = (p for p in (tmp_path / "0").rglob("*heap*") if p.is_file())
    data = bytearray(heap.read_bytes())
    data[data.index(b"P6\n32 32\n255\n") + 500] ^= 1
    heap.write_bytes(data)
    assert trained(source, tmp_path / "0", "auto") == wanted


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ValueError, match="gray and colours, found channels=4; leave it out"):
        Image("x", channels=4, decoded="auto")
    with pytest.raises(ValueError, match="decoded='auto' exclude one another"):
        Image("x", decode="device", decoded="auto", crop=CenterCrop(4))
