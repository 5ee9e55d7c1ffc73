"""Draw docs/assets/tonari.svg, at the top of the README: `python docs/site/draw_ring.py`.

It follows the reader's light or dark colours.
"""

from pathlib import Path

STYLE = """
  .page{fill:#ffffff} .card{fill:#f2f7f6;stroke:#9fb8b4} .ink{fill:#17302d} .soft{fill:#4f6b67}
  .line{stroke:#0b7d70;fill:none;stroke-width:2} .once{stroke:#7d8f8c;fill:none;stroke-width:2}
  .row{fill:#2fa08f} .new{fill:#e08a1e} .hidden{fill:none;stroke:#9fb8b4;stroke-dasharray:3 2}
  .tip{fill:#0b7d70} .tip2{fill:#7d8f8c}
  @media (prefers-color-scheme: dark){
    .page{fill:#0f1716} .card{fill:#182523;stroke:#47605c} .ink{fill:#e6f1ef} .soft{fill:#a3bab6}
    .line{stroke:#4cc9b6} .once{stroke:#8ba09c} .row{fill:#3bb5a2} .new{fill:#f0a445}
    .hidden{stroke:#5f7a75} .tip{fill:#4cc9b6} .tip2{fill:#8ba09c}
  }
  text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;font-size:15px}
  .big{font-size:17px;font-weight:600} .mid{text-anchor:middle}
"""
NODES, LEFT, WIDTH, GAP = 4, 40, 180, 26
HIDDEN, MOVED = {(0, 5), (1, 2), (1, 9), (2, 7), (3, 0), (3, 8)}, {0: 3, 1: 6, 2: 1, 3: 10}


def node(number: int) -> str:
    """Draw a node: its samples, and its ranks below."""
    x, y = LEFT + number * (WIDTH + GAP), 132
    rows = []
    for row in range(12):
        kind = "hidden" if (number, row) in HIDDEN else "new" if MOVED[number] == row else "row"
        at_x, at_y = x + 22 + row % 6 * 24, y + 46 + row // 6 * 22
        rows.append(f'<rect class="{kind}" x="{at_x}" y="{at_y}" width="17" height="15" rx="3"/>')
    middle = x + WIDTH / 2
    return "\n".join(
        [
            f'<path class="once" d="M{middle} 84 V120"/>',
            f'<path class="tip2" d="M{middle - 6} 118 h12 l-6 11z"/>',
            f'<rect class="card" x="{x}" y="{y}" width="{WIDTH}" height="156" rx="10"/>',
            f'<text class="ink mid big" x="{middle}" y="{y + 28}">node {number}</text>',
            *rows,
            f'<text class="soft mid" x="{middle}" y="{y + 112}">samples on its disk</text>',
            f'<text class="ink mid" x="{middle}" y="{y + 139}">trains on them</text>',
        ]
    )


def hop(number: int) -> str:
    """Draw the arrow from a node to the one next door."""
    x = LEFT + number * (WIDTH + GAP) + WIDTH / 2 + 12
    to = x + WIDTH + GAP - 24
    return (
        f'<path class="line" d="M{x} 290 C{x + 30} 326 {to - 30} 326 {to} 300"/>'
        f'<path class="tip" d="M{to - 7} 302 l9 -12 5 13z"/>'
    )


def legend(x: int, kind: str, words: str) -> str:
    """Name a colour."""
    return (
        f'<rect class="{kind}" x="{x}" y="362" width="17" height="15" rx="3"/>'
        f'<text class="soft" x="{x + 25}" y="375">{words}</text>'
    )


def draw() -> str:
    """Put the picture together."""
    first, last = LEFT + WIDTH / 2 - 12, LEFT + 3 * (WIDTH + GAP) + WIDTH / 2 + 12
    back = (
        f'<path class="line" d="M{last} 290 C{last} 352 {first} 352 {first} 302"/>'
        f'<path class="tip" d="M{first - 6} 303 h12 l-6 -12z"/>'
    )
    width = 2 * LEFT + NODES * WIDTH + (NODES - 1) * GAP
    words = "Each node reads its part of a dataset once, trains on it, and sends some on"
    middle = width / 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 396" role="img">',
            f"<title>{words}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{width}" height="396" rx="12"/>',
            f'<rect class="card" x="40" y="20" width="{width - 80}" height="64" rx="10"/>',
            f'<text class="ink mid big" x="{middle}" y="47">shared filesystem</text>',
            f'<text class="soft mid" x="{middle}" y="70">each shard is read once</text>',
            *map(node, range(NODES)),
            *map(hop, range(NODES - 1)),
            back,
            legend(LEFT, "row", "a sample, trained this epoch"),
            legend(300, "new", "came from next door, while training ran"),
            legend(655, "hidden", "hidden for this epoch"),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (Path(__file__).parents[1] / "assets/tonari.svg").write_text(draw())
