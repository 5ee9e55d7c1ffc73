"""What mkdocs does beside its own work: patterns of pages, links out of docs/, two references.

`prose.py` looks at how long sentences and paragraphs are, `backticks.py` at whether what stands in
backticks is there.

Links that leave ``docs/`` work where the repository is read and lead nowhere on a site. Those to
examples lead to pages made by `shown.py`; others become names of files. One that names no file of
the repository is a warning, and with ``mkdocs build --strict`` an error.
"""

import importlib
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import backticks  # type: ignore[import-not-found] # beside this file, where mkdocs looks
import prose  # type: ignore[import-not-found]
import shown  # type: ignore[import-not-found]
from defined import COMMANDS, OF_KINDS, help_of  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LOG = logging.getLogger("mkdocs.hooks.tonari")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?\)")
MODULE = re.compile(
    r"python -m ((?:benchmarks|dataio|examples|importance|shuffle|tests|tonari)(?:\.\w+)+)"
)
FILE = re.compile(
    r"(?<![\w./-])((?:benchmarks|dataio|examples|importance|packaging|shuffle|tests|tonari)/[\w./-]+\.\w+)"
)
EXAMPLE = re.compile(r"(?<![\[`])`(examples/[\w./-]*\w)/?`(?![\]`])")
API = re.compile(r"<!-- api ([\w.]+): ([\w\s]+) -->")
COMMIT = re.compile(r"\bcommit [0-9a-f]{7}\b")
FENCE = re.compile(r"^(```+).*?^\1`*$", re.MULTILINE | re.DOTALL)
NAMED = ("NodeCache", "Staging", "Workers")


def on_config(config: Any) -> Any:
    """Put pages in place of patterns in the navigation; look at what is no page, too."""
    config.nav = expand(config.nav)
    for said in prose.disallowed(prose.count_pages(), prose.allowed_lengths()):
        LOG.warning(said)
    for page in backticks.pages():
        for line, name in backticks.absent(page.read_text()):
            LOG.warning(
                f"{page.relative_to(ROOT)}:{line}: names `{name}`, and there is none; correct it, "
                "or see docs/site/backticks.py"
            )
    _warn_of_absent("README.md", (ROOT / "README.md").read_text())
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages that show the examples; only the list of all is in the navigation."""
    from mkdocs.structure.files import File, InclusionLevel

    for name, text in shown.example_pages().items():
        level = InclusionLevel.INCLUDED if name == shown.LIST else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, name, content=text, inclusion=level))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in what is made of the code, and unlink what is not part of the site."""
    if "<!-- toml keys -->" in markdown:
        markdown = markdown.replace("<!-- toml keys -->", toml_keys())
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", commands())
    markdown = API.sub(lambda names: api(names[1], names[2].split()), markdown)
    path = PurePosixPath(page.file.src_uri)
    if path.parts[0] != "adr":
        _warn_of_absent(path, markdown)
    return unlink(markdown, path)


def _warn_of_absent(page: object, markdown: str) -> None:
    for name in named_but_absent(markdown):
        LOG.warning(
            f"{page}: names {name}, and there is none; correct it, or say at which commit it was"
        )


def named_but_absent(markdown: str) -> list[str]:
    """List the modules and files of ours that a page names and the repository does not have.

    A paragraph that names a commit may name what was there then.
    """
    found = []
    for paragraph in re.split(r"\n\s*\n", markdown):
        if COMMIT.search(paragraph):
            continue
        modules = (name.replace(".", "/") for name in MODULE.findall(paragraph))
        found += [
            name
            for name in modules
            if not (ROOT / f"{name}.py").exists() and not (ROOT / name / "__main__.py").exists()
        ]
        found += [name for name in FILE.findall(paragraph) if not (ROOT / name).exists()]
    return found


def expand(nav: Any) -> Any:
    """Replace each pattern by the pages that fit it; a section without a page is left out.

    Args:
        nav: The navigation as mkdocs.yml has it: lists, mappings of one title, paths.
    """
    if isinstance(nav, dict):
        made = {title: expand(inner) for title, inner in nav.items()}
        return {title: inner for title, inner in made.items() if inner}
    if isinstance(nav, str):
        return nav
    pages: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and "*" in entry:
            found = sorted(DOCS.glob(entry), key=lambda path: (path.stem != "index", path))
            pages += [path.relative_to(DOCS).as_posix() for path in found]
        elif inner := expand(entry):
            pages.append(inner)
    return pages


def unlink(markdown: str, page: PurePosixPath) -> str:
    """Turn links out of docs/ into links to pages that show examples, or into names of files.

    An example that is named in backticks becomes a link, too.

    Args:
        markdown: Of the page.
        page: Its path, from docs/ on.
    """

    def change(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path = Path(os.path.normpath(DOCS / page.parent / target))
        if path.is_relative_to(DOCS) and path.suffix == ".md":
            return match[0]  # mkdocs checks these
        if not path.exists():
            LOG.warning(f"{page}: links to {target}, and there is no {path}; correct the link")
        elif path.is_relative_to(DOCS) and path.is_file() and path.suffix in (".png", ".svg"):
            return match[0]
        if shows := shown.page_of(path, page):
            return f"[{text}]({shows})"
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else target
        return text if name in text or path.name in text else f"{text} (`{name}`)"

    def link(match: re.Match[str]) -> str:
        shows = shown.page_of(ROOT / match[1], page)
        return f"[{match[0]}]({shows})" if shows else match[0]

    return _outside_fences(EXAMPLE, link, _outside_fences(LINK, change, markdown))


def _outside_fences(
    pattern: re.Pattern[str], change: Callable[[re.Match[str]], str], markdown: str
) -> str:
    fenced = [match.span() for match in FENCE.finditer(markdown)]

    def of_text(match: re.Match[str]) -> str:
        is_code = any(start <= match.start() < end for start, end in fenced)
        return match[0] if is_code else change(match)

    return pattern.sub(of_text, markdown)


def toml_keys() -> str:
    """Make a section of each table of a run's file: what its docstring says, and its keys."""
    import griffe

    package = griffe.load("tonari.trainer", search_paths=[ROOT])
    parts = []
    for section in _settings(package["config.config.Config"]):
        made_by = section.annotation.canonical_path
        found = package[made_by.removeprefix("tonari.trainer.")]
        parts.append(_table(section.name, found))
        for key in _settings(found):
            if (made_by := str(key.annotation)) in NAMED:
                parts.append(_table(f"{section.name}.{key.name}", griffe.load("dataio")[made_by]))
        parts += [kind_settings(section.name)] if section.name in OF_KINDS else []
    return "\n".join(parts)


def api(package: str, names: Iterable[str]) -> str:
    """Show some of a package's public names, in this order, below a heading of the page."""
    options = "    options: { heading_level: 3 }"
    return "\n\n".join(f"::: {_place_of(package, name)}\n{options}" for name in names)


def _place_of(package: str, name: str) -> str:
    """Name a public name; a function of its module's name by its module, which it would mean."""
    module = getattr(getattr(importlib.import_module(package), name), "__module__", "")
    return f"{module}.{name}" if module.endswith(f".{name}") else f"{package}.{name}"


def _table(name: str, found: Any) -> str:
    """Make the section of a table: each key with its sentence, type and default."""
    said = sentences(name, found.docstring.value, [key.name for key in _settings(found)])
    rows = [
        f"| `{key.name}` | {said[key.name]} | `{key.annotation}` | {_default(key)} |"
        for key in _settings(found)
    ]
    table = "\n".join(["| key | is | type | default |", "|---|---|---|---|", *rows])
    return f"## [{name}]\n\n{said['']}\n\n{table}\n"


def sentences(table: str, docstring: str, keys: Iterable[str]) -> dict[str, str]:
    """Take from a class's docstring a sentence for each key; a key that has none is a warning.

    Returns:
        The sentences by key, in Markdown; under ``""`` what the docstring says before them.
    """
    import griffe

    options = griffe.GoogleOptions(warnings=False)  # the types stand in the signature
    text = griffe.Docstring(inspect.cleandoc(docstring), parser="google", parser_options=options)
    parsed = text.parse()
    texts = [part.value for part in parsed if part.kind is griffe.DocstringSectionKind.text]
    said = {
        each.name: _linked(" ".join(each.description.split()))
        for part in parsed
        if part.kind.value in ("attributes", "parameters")
        for each in part.value
    }
    for key in keys:
        if not said.setdefault(key, ""):
            LOG.warning(
                f"{table}.{key} has no sentence, expected one under Attributes or Args in the "
                "docstring of its class; write it"
            )
    return {"": _linked("\n\n".join(texts))} | said


def kind_settings(section: str) -> str:
    """Make a table of the settings of each kind of a section: those that its class takes."""
    its = importlib.import_module(f"tonari.trainer.config.{section}").NAMED
    parts = []
    for kind, made_by in its.kinds.items():
        said = sentences(f'{section} "{kind}"', inspect.getdoc(made_by) or "", its.takes(kind))
        first = said[""].partition("\n\n")[0]
        rows = [
            f"| `{name}` | {said[name]} | {_value(its.default(kind, name))} |"
            for name in its.takes(kind)
        ]
        head = ["| key | is | default |", "|---|---|---|"] if rows else []
        table = "\n".join([*head, *rows])
        parts.append(f'### {section}.kind = "{kind}"\n\n`{made_by.__name__}`: {first}\n\n{table}\n')
    return "\n".join(parts)


def _value(default: object) -> str:
    return "required" if default is inspect.Parameter.empty else f"`{default!r}`"


def _settings(owner: Any) -> list[Any]:
    return [
        member
        for member in owner.members.values()
        if member.is_attribute
        and member.annotation is not None
        and "property" not in member.labels
        and member.name not in ("REST", "settings", "_", "transform")
    ]


def _default(attribute: Any) -> str:
    value = "required" if attribute.value is None else str(attribute.value)
    made = re.fullmatch(r"field\(default_factory=(?:lambda: )?(\w+)(\(.*\))?\)", value)
    if made and made[1] in NAMED:
        return "its own"
    if made:
        value = {"dict": "{}"}.get(made[1], f"{made[1]}()")
    return value if value == "required" else f"`{value}`"


def _linked(text: str) -> str:
    """Make cross-references of the public names in a docstring."""
    text = text.replace("``", "`")
    return re.sub(r"`((?:dataio|shuffle|importance)\.[A-Z][a-z][A-Za-z_]*)`", r"[`\1`][\1]", text)


def commands() -> str:
    """Write what each command's --help prints, at 80 columns."""
    parts = [f"## tonari {command}\n\n```text\n{help_of(command)}\n```\n" for command in COMMANDS]
    return "\n".join(parts)
