"""Pages that show the files of examples/: one each, and one that lists those of a directory."""

import ast
import functools
import os
import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LIST = "examples/index.md"
LANGUAGES = {".py": "python", ".toml": "toml"}


@functools.cache
def example_pages() -> dict[str, str]:
    """Make the pages: by the path that each has on the site, its text."""
    every = (path for path in sorted(EXAMPLES.rglob("*")) if path.is_file())
    files = [path for path in every if "__pycache__" not in path.parts]
    directories = {parent for path in files for parent in path.parents} - set(EXAMPLES.parents)
    made = {_page_of(path): _show(path) for path in files}
    return made | {_page_of(path): _list(path, files) for path in directories}


def page_of(path: Path, seen_from: PurePosixPath) -> str | None:
    """Find the page that shows a file or directory, as a link on another page; None: none does."""
    if not path.is_relative_to(EXAMPLES) or _page_of(path) not in example_pages():
        return None
    return os.path.relpath(_page_of(path), seen_from.parent)


def _page_of(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return f"{name}/index.md" if path.is_dir() else f"{name}.md"


def _show(path: Path) -> str:
    name, text = path.relative_to(ROOT).as_posix(), path.read_text().rstrip()
    language = LANGUAGES.get(path.suffix, "bash")
    return f"# {path.name}\n\n`{name}`, as it is run:\n\n````{language}\n{text}\n````\n"


def _list(directory: Path, files: list[Path]) -> str:
    title = "Examples" if directory == EXAMPLES else directory.name
    names = {
        path: path.relative_to(directory).as_posix() for path in files if directory in path.parents
    }
    rows = [f"| [{name}]({name}.md) | {_first_words(path)} |" for path, name in names.items()]
    return "\n".join([f"# {title}", "", "| file | is |", "|---|---|", *rows, ""])


def _first_words(path: Path) -> str:
    """Take the first sentence of a file's docstring or first comment."""
    text = path.read_text()
    if path.suffix == ".py":
        words = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = re.search(r"^# (.+(?:\n# .+)*)", text, re.MULTILINE)
        words = comment[1].replace("\n#", "") if comment else ""
    first = re.split(r"(?<=[.?])\s", words.partition("\n\n")[0])[0]
    return re.sub(r":$", ".", first).replace("\n", " ").replace("|", "\\|")
