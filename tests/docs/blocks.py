"""The fenced blocks of a page."""

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One of them.

    Attributes:
        language: As the fence names it.
        title: Name of the file that it is, if it is one.
        text: Without the fence.
    """

    language: str
    title: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    """Find the blocks of a page, in order.

    Raises:
        AssertionError: If a fence has none of the forms known here.
    """
    text = page.read_text()
    blocks = [Block(*found) for found in FENCE.findall(text)]
    assert 2 * len(blocks) == sum(line.startswith("```") for line in text.splitlines()), page
    return blocks
