"""Which sentences and paragraphs of the pages are too long to be read at once.

    python docs/site/prose.py [PAGE ...]     # each with its place; without a page: all pages
    python docs/site/prose.py --write        # lower what long_pages.toml allows

A sentence has at most 40 words, and a paragraph at most 120. Looked at are the README and all of
``docs/`` but results and decision records. Headings, tables and blocks of code are not counted; an
item of a list is a paragraph of its own; words in backticks count as words. Pages that are longer
stand in ``long_pages.toml``, whose numbers only fall: `make docs` refuses more than they allow,
and also less, until ``--write`` has lowered them.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_name("long_pages.toml")
MOST_WORDS = {"sentence": 40, "paragraph": 120}
FRONT = re.compile(r"\A---\n.*?^---\n", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^[ >]*(```+|~~~+)[^`\n]*\n.*?^[ >]*\1`*[ ]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)\s]*\)")
MARK = re.compile(r"^[ >]*(?:(?:[-*+]|\d+[.)])[ ]+|:[ ]+|(?:!!!|\?\?\?\+?|===)[ ].*)")
# What is no prose: a heading, a row of a table, a line, HTML, the target of a link, an API object.
OTHER = re.compile(r"^[ >]*(?:#|\||[-*_=]{3,}[ ]*$|<|\[[^\]]+\]:|:::)")
INDENTED = re.compile(r"^(?: {4}|\t)")
END = re.compile(r"[.!?][\"'”)\]]*\s+(?![a-z])")
SHORT = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|al|approx|Dr|Fig|No|St)|\b[A-Z])\.[\"')\]]*\s+$")


@dataclass(frozen=True)
class Long:
    """A sentence or a paragraph that is too long.

    Attributes:
        kind: Key of `MOST_WORDS`.
        line: Of its page, where it begins; counted from 1.
        words: It has.
        begins: Its first words.
    """

    kind: str
    line: int
    words: int
    begins: str


def pages() -> list[str]:
    """List the pages whose lengths are limited, from the repository's root on."""
    found = (path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return ["README.md", *sorted(page for page in found if not unlimited(page))]


def unlimited(page: str) -> bool:
    """Say whether a page is one of those whose lengths nobody limits."""
    return page.startswith(("docs/results/", "docs/adr/"))


def find_long(markdown: str) -> list[Long]:
    """Find what is too long in a page, in its order."""
    found = []
    for text, lines in paragraphs(markdown):
        start = 0
        for sentence in sentences(text):
            found += _judged("sentence", sentence, lines[start])
            start += len(sentence)
        found += _judged("paragraph", text, lines[0])
    return found


def _judged(kind: str, text: str, line: int) -> list[Long]:
    words = [word for word in text.split() if re.search(r"\w", word)]
    if len(words) <= MOST_WORDS[kind]:
        return []
    return [Long(kind, line, len(words), " ".join(words[:8]))]


def paragraphs(markdown: str) -> Iterator[tuple[str, list[int]]]:
    """Yield the prose of each paragraph, and the line that each of its characters stands on."""
    for pattern in (FRONT, FENCE, COMMENT):
        markdown = pattern.sub(lambda match: "\n" * match[0].count("\n"), markdown)
    held: list[tuple[int, str]] = []
    listed = False
    for number, line in enumerate([*markdown.splitlines(), ""], 1):
        mark = MARK.match(line)
        # Indented lines are code, but below an item, whose further paragraphs they are.
        is_code = INDENTED.match(line) and not held and not mark and not listed
        ends = not line.strip() or OTHER.match(line) or is_code
        if held and (ends or mark):
            yield _prose(held)
            held = []
        if mark:
            listed, line = True, line[mark.end() :]
        elif line.strip() and not INDENTED.match(line) and not held:
            listed = False
        if not ends and line.strip():
            held.append((number, line.lstrip(" >")))


def _prose(held: list[tuple[int, str]]) -> tuple[str, list[int]]:
    text = "".join(f"{line.rstrip()}\n" for _, line in held)
    lines = [number for number, line in held for _ in f"{line.rstrip()}\n"]
    # In its place, so that a character stays on its line: names end no sentence, links are text.
    for pattern in (CODE, LINK):
        text = pattern.sub(_plain, text)
    return re.sub(r"[*]", " ", text), lines


def _plain(match: re.Match[str]) -> str:
    if match.re is CODE:
        return re.sub(r"[^\w\s]", "_", match[0])
    before = match[0].index(match[1])
    return " " * before + match[1] + " " * (len(match[0]) - before - len(match[1]))


def sentences(text: str) -> Iterator[str]:
    """Cut a paragraph into its sentences, which together are the paragraph."""
    start = 0
    for end in END.finditer(text):
        if not SHORT.search(text[start : end.end()]):
            yield text[start : end.end()]
            start = end.end()
    if start < len(text):
        yield text[start:]


def count_long(markdown: str) -> tuple[int, int]:
    """Count a page's long sentences and its long paragraphs."""
    counted = Counter(long.kind for long in find_long(markdown))
    return counted["sentence"], counted["paragraph"]


def count_pages() -> dict[str, tuple[int, int]]:
    """Count the long sentences and paragraphs of every page whose lengths are limited."""
    return {page: count_long((ROOT / page).read_text()) for page in pages()}


def allowed_lengths() -> dict[str, tuple[int, int]]:
    """Read how many long sentences and paragraphs a page may have; others have none."""
    return {page: (a, b) for page, (a, b) in tomllib.loads(ALLOWED.read_text()).items()}


def disallowed(
    counts: dict[str, tuple[int, int]], allowed: dict[str, tuple[int, int]]
) -> list[str]:
    """Say of each page what keeps it from being as long as it is allowed to be."""
    said = []
    for page in sorted(counts.keys() | allowed.keys()):
        found, most = counts.get(page), allowed.get(page, (0, 0))
        if found is None:
            said.append(f"{page} stands in {ALLOWED.name} and is no page; take it out")
        elif found[0] > most[0] or found[1] > most[1]:
            said.append(
                f"{page} has {_words(found)}, expected at most {_words(most)}; "
                f"`python docs/site/prose.py {page}` shows them"
            )
        elif found != most or (page in allowed and found == (0, 0)):
            said.append(
                f"{page} has {_words(found)} and {ALLOWED.name} allows {_words(most)}; "
                "`python docs/site/prose.py --write` lowers that"
            )
    return said


def _words(counts: tuple[int, int]) -> str:
    return f"{counts[0]} long sentences and {counts[1]} long paragraphs"


def write_allowed(counts: dict[str, tuple[int, int]]) -> None:
    """Lower what pages are allowed to what they have; nothing is raised."""
    head = [line for line in ALLOWED.read_text().splitlines() if line.startswith("#")]
    lowered = {
        page: tuple(map(min, counts[page], most))
        for page, most in allowed_lengths().items()
        if page in counts
    }
    lines = (f'"{page}" = [{a}, {b}]' for page, (a, b) in lowered.items() if a or b)
    ALLOWED.write_text("\n".join([*head, "", *lines, ""]))


def show(given: Iterable[str]) -> Iterator[str]:
    """Say what is too long in some pages, each with its place."""
    for page in given:
        for long in find_long((ROOT / page).read_text()):
            yield f"{page}:{long.line}: {long.kind} of {long.words} words: {long.begins} ..."


def main() -> int:
    """Show what is too long, or lower what is allowed."""
    parser = argparse.ArgumentParser(description="Find long sentences and paragraphs.")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as docs/plan.md")
    parser.add_argument("--write", action="store_true", help=f"lower {ALLOWED.name}")
    options = parser.parse_args()
    given = [Path(page).resolve().relative_to(ROOT).as_posix() for page in options.pages] or pages()
    print(*show(given), sep="\n")
    sentences, paragraphs = zip(
        *(count_long((ROOT / page).read_text()) for page in given), strict=True
    )
    print(f"{_words((sum(sentences), sum(paragraphs)))} in {len(given)} pages")
    counts = count_pages()
    if options.write:
        write_allowed(counts)
    failed = disallowed(counts, allowed_lengths())
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
