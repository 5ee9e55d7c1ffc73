"""Draw the pictures of shapes in space and time: `python docs/site/draw_shapes.py`.

Pool and slots, an epoch, a quota (how_it_works.md), tiles (grids.md), packing (text.md).
"""

from collections.abc import Sequence
from pathlib import Path

from draw_ring import STYLE  # type: ignore[import-not-found]

ASSETS = Path(__file__).parents[1] / "assets"
MORE = """
  .small{font-size:13px} .tiny{font-size:12px} .end{text-anchor:end} .dash{stroke-dasharray:5 4}
  .pale{fill:#d3ebe6;stroke:#9fb8b4}
  @media (prefers-color-scheme: dark){
    .pale{fill:#23433e;stroke:#47605c}
  }
"""


def words(x: float, y: float, text: str, kind: str = "soft") -> str:
    """Write a line."""
    return f'<text class="{kind}" x="{x}" y="{y}">{text}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Draw a rounded box."""
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>'


def arrow(x: float, y: float, to_x: float, to_y: float, kind: str = "line") -> str:
    """Draw an arrow, straight down, up or to the right."""
    tip = "tip" if kind == "line" else "tip2"
    if x == to_x:
        back = -8 if to_y > y else 8
        head = f"M{to_x - 6} {to_y + back} h12 l-6 {-1.3 * back}z"
    else:
        head = f"M{to_x - 8} {to_y - 6} v12 l10 -6z"
    return f'<path class="{kind}" d="M{x} {y} L{to_x} {to_y}"/><path class="{tip}" d="{head}"/>'


def picture(title: str, height: int, drawn: Sequence[str]) -> str:
    """Put a title above."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img">',
        f"<title>{title}</title><style>{STYLE}{MORE}</style>",
        f'<rect class="page" width="760" height="{height}" rx="10"/>',
        words(24, 32, title, "ink big"),
    ]
    return "\n".join([*head, *drawn, "</svg>\n"])


def pool() -> str:
    """A node's table of rows, a batch of it, and a row that leaves."""
    rows = [(412, "0.8"), (7, "2.1"), (95, "0.0"), (388, "1.4"), (51, "0.3"), (230, "0.9")]
    drawn = []
    for slot, (sample, score) in enumerate(rows):
        x, kind = 24 + 86 * slot, {2: "hidden", 5: "new"}.get(slot, "row")
        drawn += [
            box(x, 50, 76, 84, "card"),
            words(x + 38, 70, f"slot {slot}", "soft small mid"),
            box(x + 29, 78, 17, 13, kind),
            words(x + 38, 109, f"sample {sample}", "ink tiny mid"),
            words(x + 38, 126, f"score {score}", "soft tiny mid"),
        ]
    for place, slot in enumerate((3, 0, 4)):
        x = 24 + 86 * slot + 38
        drawn += [f'<path class="line" d="M{x} 134 L{150 + 60 * place} 186"/>']
        drawn += [box(150 + 60 * place - 20, 188, 40, 24, "row")]
    return picture(
        "A node's pool: one row a sample, found by its slot",
        272,
        [
            *drawn,
            words(320, 205, "a batch: slots 3, 0, 4, in the order of this epoch"),
            arrow(530, 92, 560, 92),
            words(574, 84, "leaves after this epoch;", "soft small"),
            words(574, 102, "the row that arrives", "soft small"),
            words(574, 120, "takes slot 5", "soft small"),
            box(24, 240, 17, 13, "row"),
            words(48, 252, "trained this epoch", "soft small"),
            box(220, 240, 17, 13, "hidden"),
            words(244, 252, "hidden this epoch: not read", "soft small"),
            box(480, 240, 17, 13, "new"),
            words(504, 252, "trained, and sent to another node", "soft small"),
        ],
    )


def epoch() -> str:
    """What runs beside what, from one epoch into the next."""
    drawn = [words(116, 76 + 44 * lane, name, "ink end small") for lane, name in enumerate(
        ("training", "batches ahead", "exchange", "disk"))]  # fmt: skip
    for start, number, count in ((130, 4, 12), (560, 5, 5)):
        drawn += [box(start + 26 * step, 62, 22, 20, "row") for step in range(count)]
        drawn += [box(start + 26 * step, 106, 22, 20, "pale") for step in range(count)]
        drawn += [words(start, 54, f"steps of epoch {number}", "soft small")]
    return picture(
        "An epoch: rows travel while training runs",
        344,
        [
            *drawn,
            box(130, 150, 308, 20, "new"),
            words(138, 190, "rows that leave after epoch 4", "soft small"),
            box(560, 150, 126, 20, "new"),
            words(560, 190, "those of epoch 5", "soft small"),
            box(200, 194, 238, 20, "card"),
            words(208, 208, "arrivals are flushed", "soft small"),
            box(560, 194, 90, 20, "card"),
            words(568, 208, "commit", "soft small"),
            '<path class="once dash" d="M450 48 V226"/><path class="once dash" d="M552 48 V226"/>',
            words(501, 76, "epoch end", "ink small mid"),
            words(24, 246, "At the epoch end, on all ranks together:", "ink small"),
            words(24, 268, "1. The scores of rows that moved follow them.", "soft small"),
            words(
                24,
                288,
                "2. Each node makes its arrivals durable, and all ranks agree.",
                "soft small",
            ),
            words(
                24,
                308,
                "3. Every rank sees the new rows; the commit runs beside training.",
                "soft small",
            ),
            words(
                24, 328, "4. The policy chooses what to hide, and the order is drawn.", "soft small"
            ),
        ],
    )


def quota() -> str:
    """What stays, and what is read in windows."""
    drawn = [box(40 + 24 * n % 240, 84 + 22 * (n // 10), 18, 15, "row") for n in range(30)]
    drawn += [box(40 + 24 * (n % 10), 166 + 22 * (n // 10), 18, 15, "new") for n in range(10)]
    runs = [box(400 + 84 * run, 212, 78, 24, "pale" if run == 1 else "card") for run in range(4)]
    return picture(
        "A quota: some rows stay, the others come in windows",
        274,
        [
            box(24, 50, 272, 150, "card"),
            words(40, 73, "the node's disk, up to the quota", "ink small"),
            *drawn,
            words(312, 108, "these rows stay", "soft small"),
            words(312, 126, "for the whole run", "soft small"),
            box(560, 50, 176, 104, "card"),
            words(648, 76, "shared filesystem", "ink small mid"),
            words(648, 100, "holds every sample", "soft small mid"),
            '<path class="once" d="M560 132 H420 V172 H316"/>',
            '<path class="tip2" d="M316 166 v12 l-10 -6z"/>',
            words(434, 172, "a window: the rows that the next steps need", "soft small"),
            words(24, 228, "The steps of an epoch, cut into runs.", "ink small"),
            words(24, 248, "While one run trains, the rows of the next are read.", "soft small"),
            *runs,
            words(439, 229, "1 done", "soft small mid"),
            words(523, 229, "2 trains", "ink small mid"),
            words(607, 229, "3 is read", "soft small mid"),
            words(691, 229, "4", "soft small mid"),
        ],
    )


def tiles() -> str:
    """A variable over time, latitude and longitude, cut into samples."""
    drawn = []
    for sheet in (2, 1, 0):
        x, y = 60 + 34 * sheet, 120 - 26 * sheet
        drawn += [box(x, y, 220, 132, "card")]
        for row in range(3):
            for column in range(5):
                kind = (
                    "new"
                    if (sheet, row, column) == (0, 1, 3)
                    else "row"
                    if row < 2 and column < 2
                    else "pale"
                )
                drawn += [box(x + 6 + 42 * column, y + 6 + 41 * row, 38, 37, kind)]
    return picture(
        'tiles={"lat": 64, "lon": 64}, axis="time"',
        292,
        [
            *drawn,
            words(170, 272, "lon, in tiles of 64", "soft small mid"),
            words(24, 188, "lat", "soft small"),
            words(40, 112, "time", "soft small"),
            box(410, 74, 18, 15, "new"),
            words(438, 86, "one sample: one time, one tile", "ink small"),
            box(410, 124, 18, 15, "row"),
            words(438, 136, "one chunk of the file: 2 x 2 tiles,", "ink small"),
            words(438, 154, "many times. Its samples have neighbouring", "soft small"),
            words(438, 172, "numbers, so one node reads the chunk, once.", "soft small"),
            words(410, 216, "A variable without an axis, such as a land mask", "soft small"),
            words(410, 234, "[lat, lon], gives each sample its tile.", "soft small"),
        ],
    )


def packing() -> str:
    """Documents in sequences of one length, in both ways."""
    ways = [
        ("concatenated: documents follow one another, and are cut where a sequence is full",
         [[(0, 60), (1, 30), (2, 30)], [(2, 40), (3, 50), (4, 30)], [(4, 20), (5, 80), (6, 10)]]),
        ("best_fit: only documents longer than a sequence are cut; little room is left",
         [[(5, 80), (1, 30), (6, 10)], [(2, 70), (4, 50)], [(0, 60), (3, 50)]]),
    ]  # fmt: skip
    drawn = []
    for way, (name, sequences) in enumerate(ways):
        top = 60 + 134 * way
        drawn += [words(24, top, name, "ink small")]
        for row, pieces in enumerate(sequences):
            x, y = 24.0, top + 14 + 30 * row
            drawn += [box(x, y, 600, 24, "hidden")]
            for document, length in pieces:
                kind = ("row", "new", "pale")[document % 3]
                drawn += [box(x, y, 5 * length - 3, 24, kind)]
                drawn += [words(x + 2.5 * length, y + 17, str(document), "ink small mid")]
                x += 5 * length
            drawn += [words(636, y + 17, f"sequence {row}", "soft small")]
    below = "A box is a document, or a piece of one, with its number."
    drawn += [words(24, 318, below, "soft small")]
    return picture("Packing documents into sequences of one length", 334, drawn)


if __name__ == "__main__":
    for draw in (pool, epoch, quota, tiles, packing):
        (ASSETS / f"{draw.__name__}.svg").write_text(draw())
