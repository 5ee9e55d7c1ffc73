"""Samples side by side in one picture, with a few words under each."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from dataio.rows.decode import PILLOW_ERRORS, open_picture

SIDE, GAP, MARGIN = 128, 14, 24
COLUMNS = 10
TITLE_SIZE, NAME_SIZE, NOTE_SIZE = 22, 16, 13
LINE = {NAME_SIZE: 20, NOTE_SIZE: 16}
HEAD = 48
PAPER, INK, NOTE, MISSING = "white", "#1a1a1a", "#666666", "#eeeeee"


@dataclass(frozen=True)
class Tile:
    """A sample of the picture.

    Attributes:
        image: As the source holds it.
        name: First line under it.
        notes: Smaller lines under that.
        begins: Whether it begins a line of tiles.
    """

    image: bytes
    name: str
    notes: tuple[str, ...]
    begins: bool = False


def draw_tiles(tiles: Sequence[Tile], *, title: str) -> Image.Image:
    """Lay tiles out in lines of `COLUMNS`, as narrow as there are few.

    Args:
        tiles: At least one; all with as many notes.
        title: Above them.
    """
    places = _places(tiles)
    columns = 1 + max(column for _, column in places)
    words = LINE[NAME_SIZE] + LINE[NOTE_SIZE] * max(len(tile.notes) for tile in tiles)
    height = SIDE + 6 + words + GAP
    title_font = ImageFont.load_default(TITLE_SIZE)
    width = max(columns * (SIDE + GAP) - GAP, int(title_font.getlength(title)) + 1)
    lines = 1 + places[-1][0]
    picture = Image.new("RGB", (width + 2 * MARGIN, HEAD + MARGIN + lines * height), PAPER)
    pen = ImageDraw.Draw(picture)
    pen.text((MARGIN, MARGIN - 8), title, INK, title_font)
    for tile, (line, column) in zip(tiles, places, strict=True):
        corner = (MARGIN + column * (SIDE + GAP), MARGIN + HEAD - 8 + line * height)
        _draw(picture, pen, tile, corner)
    return picture


def to_png(picture: Image.Image) -> bytes:
    """Compress a picture."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _places(tiles: Sequence[Tile]) -> list[tuple[int, int]]:
    """Line and column of each tile."""
    places: list[tuple[int, int]] = []
    line, column = 0, 0
    for tile in tiles:
        if places and (tile.begins or column == COLUMNS):
            line, column = line + 1, 0
        places.append((line, column))
        column += 1
    return places


def _draw(
    picture: Image.Image, pen: ImageDraw.ImageDraw, tile: Tile, corner: tuple[int, int]
) -> None:
    left, top = corner
    shown = _thumbnail(tile.image)
    if shown is None:
        pen.rectangle((left, top, left + SIDE - 1, top + SIDE - 1), MISSING)
        middle = (left + SIDE // 2, top + SIDE // 2)
        pen.text(middle, "does not decode", NOTE, ImageFont.load_default(NOTE_SIZE), anchor="mm")
    else:
        picture.paste(shown, (left + (SIDE - shown.width) // 2, top + (SIDE - shown.height) // 2))
    top += SIDE + 6
    for text, size, color in [
        (tile.name, NAME_SIZE, INK),
        *((n, NOTE_SIZE, NOTE) for n in tile.notes),
    ]:
        font = ImageFont.load_default(size)
        pen.text((left, top), _fitted(text, font), color, font)
        top += LINE[size]


def _thumbnail(data: bytes) -> Image.Image | None:
    """Scale an image to fit a tile; None if it does not decode, as the hardest may not."""
    try:
        image = open_picture(data, draft=("RGB", (2 * SIDE, 2 * SIDE))).convert("RGB")
        scale = SIDE / max(image.size)
        size = tuple(max(1, round(side * scale)) for side in image.size)
        return image.resize((size[0], size[1]), Image.Resampling.BICUBIC)
    except PILLOW_ERRORS:
        return None


def _fitted(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Cut what is wider than a tile."""
    if font.getlength(text) <= SIDE:
        return text
    while text and font.getlength(text + "...") > SIDE:
        text = text[:-1]
    return text + "..."
