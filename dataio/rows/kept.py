"""Pictures kept as plain pixels where these are few: `Image(decoded="auto")`.

They are kept as PPM or PGM, so all that reads pictures reads them, and `decode_image` decodes
nothing again. Each picture decides by itself, so a row's bytes are the same whoever stages it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError
from dataio.rows.decode import decode_image, image_shape, pixels_header
from dataio.rows.image import Image, Mask
from dataio.rows.jpeg import jpeg_header
from dataio.rows.orientation import JPEG_START, UPRIGHT, find_orientation
from dataio.rows.rows import Rows, make_rows, row_offsets
from dataio.rows.whole import is_whole

MOST_TIMES = 4
"""Of the bytes of a compressed picture: so many bytes of pixels are kept in its place."""


def keep_pixels(
    rows: Rows, pictures: Mapping[str, Image | Mask], refused: Mapping[int, Iterable[int]]
) -> Rows:
    """Decode the pictures that are to be kept as pixels.

    Args:
        rows: As they were read.
        pictures: The fields that are pictures.
        refused: For numbers of variable fields the rows that stay as they are.
    """
    lengths, variable = rows.lengths.copy(), list(rows.variable)
    for number, name in enumerate(rows.schema.variable):
        kind = pictures.get(name)
        if not isinstance(kind, Image) or kind.decoded != "auto":
            continue
        bounds, column = row_offsets(rows.lengths[:, number]).tolist(), rows.variable[number]
        parts = [column[bounds[row] : bounds[row + 1]] for row in range(len(rows))]
        whole = replace(kind, resize=None, crop=None, flip=0.0, decoded=False)
        for row in {*range(len(rows))}.difference(refused.get(number, ())):
            parts[row] = _kept(parts[row], kind, whole)
        lengths[:, number] = [len(part) for part in parts]
        variable[number] = np.concatenate([np.empty(0, np.uint8), *parts])
    return make_rows(rows.schema, rows.sample_id, rows.fixed, lengths, variable)


def _kept(data: NDArray[np.uint8], kind: Image, whole: Image) -> NDArray[np.uint8]:
    """Decode a picture if its pixels are few, and what is delivered of them is the same."""
    is_jpeg = data[:2].tobytes() == JPEG_START
    try:
        if is_jpeg:
            size, _ = jpeg_header(data)
        else:
            size = image_shape(data, upright=kind.upright)
        header = pixels_header(size, kind.channels)
        num_bytes = size[0] * size[1] * kind.channels
        if len(header) + num_bytes > MOST_TIMES * len(data):
            return data
        # A JPEG of twice the size is decoded smaller. One that lies on its side, or has no end, is
        # left to who finds that.
        fits = kind.resize.resized(size) if kind.resize is not None else kind.out
        if is_jpeg and (
            (fits and size[0] >= 2 * fits[0] and size[1] >= 2 * fits[1])
            or (kind.upright and find_orientation(data) != UPRIGHT)
            or not is_whole(data.data)
        ):
            return data
        kept = np.empty(len(header) + num_bytes, np.uint8)
        kept[: len(header)] = np.frombuffer(header, np.uint8)
        out = kept[len(header) :].reshape(*size, kind.channels)
        decode_image(data, out, whole, where="")
    except (ValueError, FieldError):
        return data
    return kept
