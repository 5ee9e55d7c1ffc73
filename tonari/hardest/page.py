"""The hardest rows as one page to click through, which saves a list of those to leave out.

It needs nothing beside it: images are inside, and what is marked stays in the browser.
"""

import base64
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from dataio.base.seeding import digest
from dataio.rows.decode import PILLOW_ERRORS, open_picture
from tonari.hardest.rank import Measure
from tonari.hardest.table import Row, words
from tonari.report.pages import lay_out

TEMPLATE = Path(__file__).with_name("rows.jinja")

SIDE = 480
"""Pixels of the longer side of an image in the page, where it is larger."""

MOST_BYTES = 32 << 10
"""An image of at most so many is in the page as it is."""

SMALL_SIDE = 64
"""An image up to here is shown with its pixels."""

SHOWN = {"JPEG": "jpeg", "PNG": "png", "WEBP": "webp", "GIF": "gif"}
"""Formats that every browser shows."""


def page(rows: Sequence[Row], images: Sequence[bytes] | None, *, by: Measure, title: str) -> str:
    """Lay out the page.

    Args:
        rows: Of the table.
        images: Of the first rows, as the source holds them; None where it has none.
        by: What the rows were ranked by.
        title: Above them.
    """
    known = [{**_named(row), "words": words(row, by)} for row in rows]
    return _filled(rows, images, known, title=title)


def duplicates_page(rows: Sequence[Row], images: Sequence[bytes] | None, *, title: str) -> str:
    """Lay out the page of groups of near duplicates; all but one of each are marked at first.

    Args:
        rows: Group by group: ``group``, ``sample_id``, ``key``, ``label``, ``class``,
            ``similarity``, ``labels_disagree``, ``kept`` and whatever else is known.
        images: Of the first rows; None where there are none.
        title: Above them.
    """
    known = [
        {
            **_named({"rank": place, **row}),
            "words": f"similarity {row['similarity']}",
            "group": row["group"],
            "disagree": row["labels_disagree"],
            "proposed": not row["kept"],
        }
        for place, row in enumerate(rows, start=1)
    ]
    return _filled(rows, images, known, title=title)


def rows_page(rows: Sequence[Row], images: Sequence[bytes] | None, *, title: str) -> str:
    """Lay out the page of rows that were trained: of each what is known, and its picture.

    Args:
        rows: ``sample_id``, ``key`` and whatever else is known.
        images: Of the first rows; None where there are none.
        title: Above them.
    """
    known = [
        {**_named({"rank": place, "label": None, "class": None, **row}), "words": row["words"]}
        for place, row in enumerate(rows, start=1)
    ]
    return _filled(rows, images, known, title=title)


def _named(row: Row) -> dict[str, object]:
    of_documents = [name for name in ("title", "where", "document", "place") if name in row]
    always = ("rank", "sample_id", "key", "label", "class")
    return {name: row[name] for name in (*always, *of_documents)}


def _filled(
    rows: Sequence[Row],
    images: Sequence[bytes] | None,
    known: Sequence[dict[str, object]],
    *,
    title: str,
) -> str:
    shown = []
    for place, (row, of_row) in enumerate(zip(rows, known, strict=True)):
        facts = {name: _plain(value) for name, value in row.items() if value is not None}
        image = _image(images[place]) if images is not None and place < len(images) else {}
        shown.append({**of_row, "facts": facts, **image})
    identity = digest(json.dumps([row["sample_id"] for row in rows]))
    # What is left out is a sample, or of packed text a document
    is_document = bool(known) and known[0].get("document") is not None
    columns = ["document", "place"] if is_document else ["sample_id", "key"]
    document = {"digest": identity, "columns": columns, "rows": shown}
    text = json.dumps(document, allow_nan=False)
    # No sample's name may end the script that it stands in
    return lay_out(TEMPLATE, heading=title, data=text.replace("<", "\\u003c"))


def _plain(value: object) -> object:
    """Write what JSON has no number for."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _image(data: bytes) -> dict[str, object]:
    """Make what the page knows of an image: none where it does not decode."""
    try:
        with Image.open(io.BytesIO(data)) as header:
            small = max(header.size) <= SMALL_SIDE
            kind = SHOWN.get(header.format or "")
        image = open_picture(data, draft=("RGB", (SIDE, SIDE)))
        if kind is None or len(data) > MOST_BYTES:
            kind, data = "jpeg", _shrunk(image)
    except PILLOW_ERRORS:
        return {"image": None}
    return {"image": f"data:image/{kind};base64,{base64.b64encode(data).decode()}", "small": small}


def _shrunk(image: Image.Image) -> bytes:
    picture = image.convert("RGB")
    picture.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return file.getvalue()
