"""Draw docs/assets/slurm_loop.svg, of docs/slurm_loop.md: `python docs/site/draw_slurm.py`.

It follows the reader's light or dark colours.
"""

from pathlib import Path

from draw_ring import STYLE  # type: ignore[import-not-found]

WIDTH, HEIGHT, BAR, TOP = 860, 196, 46, 92
LIMIT, WORDS = 480, "A job saves before its time limit, is queued again, and goes on"
PARTS = (  # from, to, kind, words
    (40, 330, "row", "train"),
    (330, 400, "new", "save"),
    (400, 590, "rest", "in the queue"),
    (590, 670, "new", "restore"),
    (670, 820, "row", "train"),
)
MARKS = (
    (330, "USR1 comes"),
    (LIMIT, "time limit"),
    (590, "starts again"),
)


def part(start: int, end: int, kind: str, words: str) -> str:
    """Draw what is done from one time to another."""
    text = "soft" if kind == "rest" else "on"
    return (
        f'<rect class="{kind}" x="{start}" y="{TOP}" width="{end - start}" height="{BAR}" rx="5"/>'
        f'<text class="{text} mid" x="{(start + end) / 2}" y="{TOP + 28}">{words}</text>'
    )


def mark(x: int, words: str) -> str:
    """Mark a time."""
    return (
        f'<path class="once" d="M{x} {TOP - 18} V{TOP} M{x} {TOP + BAR} v8"/>'
        f'<text class="ink mid" x="{x}" y="{TOP - 28}">{words}</text>'
    )


def draw() -> str:
    """Put the picture together."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{WORDS}</title>",
            f"<style>{STYLE} .on{{fill:#06201d}}</style>",
            f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="12"/>',
            f'<text class="ink big" x="40" y="32">{WORDS}</text>',
            *(part(*each) for each in PARTS),
            *(mark(*each) for each in MARKS),
            f'<path class="line" d="M330 {TOP + BAR + 22} H{LIMIT}"/>',
            f'<text class="soft mid" x="405" y="{TOP + BAR + 44}">300 s</text>',
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (Path(__file__).parents[1] / "assets/slurm_loop.svg").write_text(draw())
