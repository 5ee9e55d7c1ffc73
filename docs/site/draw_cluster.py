"""Draw docs/assets/cluster.svg, of docs/cluster.md: `python docs/site/draw_cluster.py`.

It follows the reader's light or dark colours.
"""

from pathlib import Path

from draw_ring import STYLE  # type: ignore[import-not-found]

NODES, RANKS, LEFT, WIDTH, GAP, TOP = 3, 2, 40, 250, 25, 150
WORDS = "A cluster: nodes with ranks and a local disk each, one network, one shared filesystem"


def box(kind: str, x: float, y: float, width: float, height: float) -> str:
    """Draw a box."""
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'


def words(kind: str, x: float, y: float, text: str) -> str:
    """Write a line, its middle at x."""
    return f'<text class="mid {kind}" x="{x}" y="{y}">{text}</text>'


def node(number: int) -> str:
    """Draw a node: its ranks, and below them its disk."""
    x, middle = LEFT + number * (WIDTH + GAP), LEFT + number * (WIDTH + GAP) + WIDTH / 2
    parts = [
        f'<path class="once" d="M{middle} 114 V{TOP}"/>',
        box("card", x, TOP, WIDTH, 212),
        words("ink big", middle, TOP + 28, f"node {number}"),
    ]
    for local_rank in range(RANKS):
        at_x, rank = x + 20 + local_rank * 110, number * RANKS + local_rank
        parts += [
            box("row", at_x, TOP + 44, 100, 62),
            words("on big", at_x + 50, TOP + 71, f"rank {rank}"),
            words("on", at_x + 50, TOP + 93, "one GPU"),
            f'<path class="line" d="M{at_x + 50} {TOP + 106} v18"/>',
        ]
    return "\n".join(
        [
            *parts,
            box("disk", x + 20, TOP + 148, 210, 48),
            words("ink", middle, TOP + 178, "local disk: this node only"),
        ]
    )


def draw() -> str:
    """Put the picture together."""
    width = 2 * LEFT + NODES * WIDTH + (NODES - 1) * GAP
    middle, inner = width / 2, width - 2 * LEFT
    style = f"{STYLE} .on{{fill:#06201d}} .disk{{fill:none;stroke:#7d8f8c;stroke-width:2}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 400" role="img">',
            f"<title>{WORDS}</title>",
            f"<style>{style}</style>",
            f'<rect class="page" width="{width}" height="400" rx="12"/>',
            box("card", LEFT, 18, inner, 50),
            words("ink big", middle, 49, "shared filesystem: all nodes see the same files"),
            f'<path class="once" d="M{middle} 68 V88"/>',
            box("card", LEFT, 88, inner, 26),
            words("soft", middle, 106, "network"),
            *map(node, range(NODES)),
            f'<path class="line" d="M{LEFT + 20} {TOP + 124} H{width - LEFT - 20}"/>',
            words(
                "soft",
                middle,
                384,
                "Green line: a collective call. All six ranks have to come to it.",
            ),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (Path(__file__).parents[1] / "assets/cluster.svg").write_text(draw())
