"""The page of the hardest rows: what it holds, and what clicking through it does in a browser."""

import base64
import html
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.browser import browse, needs_browser
from tonari.hardest.page import MOST_BYTES, SIDE, page
from tonari.hardest.table import HEADER, Row


def row(rank: int, sample_id: int, **known: object) -> Row:
    given = {"rank": rank, "sample_id": sample_id, "loss": 4.0 - rank, "epoch": 2}
    return dict.fromkeys(HEADER) | given | known


def picture(side: int, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(side).integers(0, 255, (side, side * 2, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def held(text: str) -> dict[str, Any]:
    """What stands in a page's data."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


ROWS = [
    row(1, 41, key='a, "quoted" <b>key</b></script>', label=3, **{"class": "cat & dog"}),
    row(2, 7, key="plain", label=5, loss=np.inf, **{"class": "ship"}),
    row(3, 20, key="third", label=3, **{"class": "cat & dog"}),
]
IMAGES = [picture(8), b"no image at all", picture(300, "BMP")]


@pytest.fixture
def text() -> str:
    return page(ROWS, IMAGES, by="loss", title="hardest 3 of 50 rows")


def test_every_row_is_there_with_all_that_is_known_of_it(text: str) -> None:
    document = held(text)
    assert text.count("hardest 3 of 50 rows</") == 2, "the page's title and its heading"
    assert [shown["sample_id"] for shown in document["rows"]] == [41, 7, 20]
    assert [shown["words"] for shown in document["rows"]] == ["loss 3.00", "loss inf", "loss 1.00"]
    assert document["rows"][0]["key"] == ROWS[0]["key"], "and it ends no script"
    assert document["rows"][1]["facts"] == {
        "rank": 2, "sample_id": 7, "key": "plain", "label": 5, "class": "ship", "loss": "inf",
        "epoch": 2,
    }  # fmt: skip


def test_small_images_are_there_as_they_are_large_ones_smaller_and_broken_ones_are_named(
    text: str,
) -> None:
    small, broken, large = held(text)["rows"]
    kind, data = small["image"].split(",")
    assert (kind, small["small"]) == ("data:image/png;base64", True)
    assert base64.b64decode(data) == IMAGES[0]
    assert broken["image"] is None
    kind, data = large["image"].split(",")
    assert (kind, large["small"]) == ("data:image/jpeg;base64", False)
    with Image.open(io.BytesIO(base64.b64decode(data))) as shown:
        assert shown.size == (SIDE, SIDE // 2)
    assert len(IMAGES[2]) > MOST_BYTES


def test_rows_without_pictures_are_there_too() -> None:
    document = held(page(ROWS, None, by="loss", title=""))
    assert [("image" in shown) for shown in document["rows"]] == [False] * 3
    document = held(page(ROWS, IMAGES[:1], by="loss", title=""))
    assert [("image" in shown) for shown in document["rows"]] == [True, False, False]


def test_the_page_needs_nothing_else(text: str) -> None:
    assert "{{" not in text
    assert not re.search(r"(src|href|srcset)=\"|url\(|@import|https?:", text)


def test_marks_of_other_rows_are_not_taken_for_these(text: str) -> None:
    others = page(ROWS[:2], None, by="loss", title="hardest 3 of 50 rows")
    assert held(text)["digest"] != held(others)["digest"]


CLICKS = """
const seen = [];
const cards = () => [...document.querySelectorAll(".card")];
const key = (name) => document.dispatchEvent(new KeyboardEvent("keydown", { key: name }));
seen.push(cards().map((card) => card.querySelector("b").textContent));
cards()[0].querySelector("input").click();
seen.push(document.querySelectorAll(".card.out").length);
cards()[0].querySelector("img").click();
seen.push(document.getElementById("facts").textContent.includes("quoted"));
key("ArrowRight"); key("ArrowRight"); key("ArrowRight"); key("x");
seen.push(document.getElementById("mark").checked);
key("ArrowLeft");
seen.push(document.getElementById("large").textContent);
key("Escape");
seen.push(document.getElementById("view").className);
seen.push(list());
document.getElementById("shown").value = "kept";
document.getElementById("shown").dispatchEvent(new Event("change"));
seen.push(cards().map((card) => card.querySelector("b").textContent));
document.getElementById("all").click();
seen.push(document.getElementById("save").textContent);
seen.push(JSON.parse(localStorage.getItem(store)));
document.body.setAttribute("data-seen", JSON.stringify(seen));
"""


@needs_browser
def test_clicking_and_keys_mark_rows_and_the_list_names_them(text: str, tmp_path: Path) -> None:
    probe = tmp_path / "probe.html"
    probe.write_text(text.replace("</body>", f"<script>{CLICKS}</script></body>"))
    shown = browse(probe, "--dump-dom")
    found = re.search(r'data-seen="([^"]*)"', shown)
    assert found is not None
    seen = json.loads(html.unescape(found[1]))
    assert seen == [
        ["cat & dog", "ship", "cat & dog"],
        1,
        True,
        True,
        "does not decode",
        "",
        'sample_id,key\n41,"a, ""quoted"" <b>key</b></script>"\n20,third\n',
        ["ship"],
        "Save the 3 left out as exclude.csv",
        [41, 20, 7],
    ]
