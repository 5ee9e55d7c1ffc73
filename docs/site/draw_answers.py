"""Draw what commands measure and answer: `python docs/site/draw_answers.py`.

Patterns of reading (bench_io.md), a log of rows (rows.md), losses (hardest.md), a step (plan.md).
"""

from pathlib import Path

from draw_shapes import arrow, box, picture, words  # type: ignore[import-not-found]

Picture = tuple[str, int, list[str]]
"""A title, the height in pixels, and what is drawn."""
ASSETS = Path(__file__).parents[1] / "assets"


def cell(x: float, y: float, kind: str, text: object = "", height: float = 24) -> list[str]:
    """Draw a sample or a step, and a word in it."""
    return [box(x, y, 26, height, kind), words(x + 13, y + height - 7, f"{text}", "ink tiny mid")]


def patterns() -> Picture:
    """In which order two clients read samples, by pattern."""
    order = [9, 3, 0, 6, 1, 0, 8, 4, 0, 2, 7, 5]
    drawn = []
    for lane, (name, how) in enumerate((
        ("file_per_sample", "a file a sample, opened and closed"),
        ("sequential_shard", "a shard from its start"),
        ("random_record", "samples of a shard, in random order"),
        ("strided", "two clients in turns, one shard"),
        ("many_readers", "two clients, each all of one shard"),
        ("checkpoint_burst", "random reads beside a write"),
    )):  # fmt: skip
        y = 56 + 50 * lane
        drawn += [words(24, y + 10, name, "ink small"), words(24, y + 27, how, "soft tiny")]
        if name != "file_per_sample":
            drawn += [box(284, y - 4, 364, 32, "card")]
        for n in range(12):
            x = 288 + 30 * n
            if name in ("random_record", "checkpoint_burst"):
                drawn += cell(x, y, "row" if order[n] else "pale", order[n] or "")
            elif name == "strided":
                drawn += cell(x, y, ("row", "new")[n % 2], n // 2 + 1)
            elif name == "many_readers":
                drawn += [box(x, y, 26, 11, "row"), box(x, y + 13, 26, 11, "new")]
            else:
                drawn += cell(x, y, "row", n + 1)
    drawn += [box(660, 302, 76, 32, "new"), words(698, 322, "synced", "ink tiny mid")]
    drawn += [box(24, 362, 18, 14, "row"), words(50, 374, "read by one client", "soft small")]
    drawn += [box(200, 362, 18, 14, "new"), words(226, 374, "by another, or written", "soft small")]
    drawn += [box(410, 362, 18, 14, "pale"), words(436, 374, "not read", "soft small")]
    drawn += [words(520, 374, "the numbers are the order", "soft small")]
    return "What each pattern reads of a directory or a shard", 394, drawn


def trained() -> Picture:
    """Which rows a step trained, and when a sample was trained."""
    drawn = [words(144 + 30 * step + 13, 66, f"{step}", "soft tiny mid") for step in range(10)]
    drawn += [words(136, 66, "step", "soft small end")]
    for epoch, at in enumerate((7, 2, None, 5)):
        y = 76 + 34 * epoch
        drawn += [words(136, y + 17, f"epoch {epoch}", "ink small end")]
        for step in range(10):
            kind = "new" if step == at else "row" if (epoch, step) == (1, 6) else "pale"
            drawn += cell(144 + 30 * step, y, kind, 17 if step == at else "")
        words_of = "hidden: it was not trained" if at is None else f"sample 17 in step {at}"
        drawn += [words(456, y + 17, words_of, "soft small")]
    return (
        "A log of rows answers both ways",
        288,
        [
            *drawn,
            words(24, 240, "--sample 17", "ink small"),
            words(
                170,
                240,
                "each step that trained it, on which rank, at which place of the batch",
                "soft small",
            ),
            words(24, 266, "--epoch 1 --steps 6:7", "ink small"),
            box(170, 254, 18, 14, "row"),
            words(
                196,
                266,
                "all rows of that step: rank 0: 4, 812, 93, ...; rank 1: 51, 7, 640, ...",
                "soft small",
            ),
        ],
    )


def losses() -> Picture:
    """Losses of three rows over the epochs of a run."""
    drawn = []
    for row, (name, values, then) in enumerate((
        ("most rows", (60, 34, 18, 10, 6, 4, 3, 2), "low after some epochs"),
        ("a rare picture", (62, 58, 50, 40, 32, 22, 16, 12), "falls late: may be listed"),
        ("a wrong label", (58, 60, 66, 62, 68, 64, 70, 68), "stays high: first on the list"),
    )):  # fmt: skip
        bottom = 128 + 88 * row
        drawn += [words(24, bottom - 20, name, "ink small")]
        drawn += [f'<path class="once" d="M170 {bottom} H466"/>']
        for epoch, value in enumerate(values):
            kind = "new" if row == 2 else "row"
            drawn += [box(178 + 36 * epoch, bottom - value, 26, value, kind)]
        drawn += [words(490, bottom - 20, then, "soft small")]
    drawn += [words(191 + 36 * epoch, 322, f"{epoch}", "soft tiny mid") for epoch in range(8)]
    drawn += [words(490, 322, "epoch", "soft tiny")]
    return "The losses of three rows, an epoch a bar", 340, drawn


def simulated() -> Picture:
    """Two ranks in a step: computing, messages, waits; and the reader's batches."""
    lanes = {
        "rank 0": [
            (0, 150, "row", "computes"), (150, 60, "hidden", "waits"),
            (210, 70, "new", "all-reduce"), (280, 110, "row", "computes"), (390, 80, "new", "send"),
        ],
        "rank 1": [
            (0, 210, "row", "computes"), (210, 70, "new", "all-reduce"), (280, 70, "row", ""),
            (350, 40, "hidden", ""), (390, 80, "new", "receive"), (470, 60, "row", ""),
        ],
        "its loader": [(0, 250, "pale", "batches ahead"), (264, 266, "card", "rows that leave")],
    }  # fmt: skip
    drawn = []
    for lane, (name, events) in enumerate(lanes.items()):
        y = 58 + 48 * lane
        drawn += [words(136, y + 20, name, "ink small end")]
        for start, length, kind, text in events:
            drawn += [box(150 + start, y, length - 3, 30, kind)]
            drawn += [words(150 + start + length / 2, y + 20, text, "ink tiny mid")]
    return (
        "A step as a plan simulates it",
        274,
        [
            *drawn,
            '<path class="once dash" d="M360 50 V150"/>',
            arrow(150, 214, 690, 214, "once"),
            words(690, 234, "time", "soft small end"),
            words(150, 234, "A message begins when all of its ranks have issued it:", "soft small"),
            words(
                150,
                254,
                "who comes first waits. How long each computes was measured.",
                "soft small",
            ),
        ],
    )


if __name__ == "__main__":
    for draw in (patterns, trained, losses, simulated):
        (ASSETS / f"{draw.__name__}.svg").write_text(picture(*draw()))
