"""The picture of a plan: well-formed, to scale, and nothing cut or on top of another."""

from collections.abc import Iterator
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from tonari.plan.picture import BAR, FONT, INNER, WIDTH, Bar, Drawing
from tonari.report.pictures import DARK

SVG = "{http://www.w3.org/2000/svg}"
PARTS = {
    "computing": 3.0, "waiting: all-reduce": 1.5, "waiting: reduce-scatter": 0.4, "bubble": 0.25,
    "dp": 0.2, "pp": 0.2, "tp": 0.1, "turn <&>": 0.1, "the ninth part": 0.1, "the tenth": 0.1,
    "nothing": 0.0,
}  # fmt: skip
SETTINGS = " ".join(f"mesh.sequence_parallel_{number}=true" for number in range(9))
BARS = [Bar(f"{number}. {SETTINGS}", PARTS | {"dp": float(number)}) for number in range(4)]
DRAWINGS = {"one": [Bar("a step", PARTS)], "four": BARS}


@pytest.fixture(params=DRAWINGS)
def drawn(request) -> ElementTree.Element:
    return ElementTree.fromstring(Drawing("Where <it> goes & why", DRAWINGS[request.param]).svg())


def boxes(svg: ElementTree.Element, *, parts: bool) -> Iterator[tuple[float, float, float, float]]:
    """Left, top, right and bottom of the bars' parts, or of words, as a wide font has them."""
    for each in svg.iter(f"{SVG}rect" if parts else f"{SVG}text"):
        if parts and each.get("class") == "part":
            left, top, width, height = (
                float(each.attrib[x]) for x in ("x", "y", "width", "height")
            )
            yield left, top, left + width, top + height
        elif not parts and each.get("class") != "share":
            left, base = float(each.attrib["x"]), float(each.attrib["y"])
            font = FontProperties(weight="bold" if each.get("class") == "title" else "normal")
            width = TextPath((0, 0), each.text or "", size=FONT, prop=font).get_extents().x1
            yield left, base - 0.76 * FONT, left + width, base + 0.24 * FONT


def test_nothing_reaches_over_the_edge(drawn):
    assert (drawn.attrib["width"], drawn.attrib["viewBox"].split()[2]) == ("960", "960")
    bottom = float(drawn.attrib["height"])
    for parts in (True, False):
        for left, top, right, low in boxes(drawn, parts=parts):
            assert left >= 0 < top
            assert right <= WIDTH
            assert low <= bottom


def test_no_words_lie_on_others_or_on_a_bar(drawn):
    words = list(boxes(drawn, parts=False))
    for number, one in enumerate(words):
        for other in (*words[:number], *boxes(drawn, parts=True)):
            apart = one[2] <= other[0] or other[2] <= one[0]
            assert apart or one[3] <= other[1] or other[3] <= one[1]


def test_parts_follow_each_other_to_one_scale(drawn):
    rows: dict[float, list[tuple[float, float]]] = {}
    for left, top, right, low in boxes(drawn, parts=True):
        assert low - top == BAR
        rows.setdefault(top, []).append((left, right))
    bars = DRAWINGS["one"] if len(rows) == 1 else BARS
    longest_s = max(bar.whole_s for bar in bars)
    for bar, ends in zip(bars, rows.values(), strict=True):
        assert ends[-1][1] - ends[0][0] == pytest.approx(INNER * bar.whole_s / longest_s, abs=0.1)
        assert [left for left, _ in ends[1:]] == pytest.approx(
            [end for _, end in ends[:-1]], abs=0.1
        )


def test_every_part_that_lasts_is_in_the_legend_in_its_own_look(drawn):
    looks = [
        (each.attrib["fill"], each.get("fill-opacity"))
        for each in drawn.iter(f"{SVG}rect")
        if each.get("rx")
    ]
    shown = "".join(text.text or "" for text in drawn.iter(f"{SVG}text"))
    assert len(set(looks)) == len(looks) == 10
    assert all((name in shown) == (seconds > 0) for name, seconds in PARTS.items())


def test_a_dark_page_has_its_colours(drawn):
    (style,) = (each.text or "" for each in drawn.iter(f"{SVG}style"))
    _, dark = style.split("@media (prefers-color-scheme: dark)")
    assert DARK["paper"] in dark
    assert DARK["text"] in dark
