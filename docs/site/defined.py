"""What there is to name on a page: classes, commands and their options, keys of TOML files."""

import ast
import contextlib
import dataclasses
import functools
import importlib
import io
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

ROOT = Path(__file__).parents[2]
PACKAGES = ("benchmarks", "dataio", "examples", "importance", "shuffle", "tests", "tonari")
PROGRAMS = ("benchmarks", "examples")
OF_KINDS = ("shuffle", "importance", "model")
COMMANDS = (
    "demo", "init", "train", "pack", "cache ls", "cache inspect", "cache stage", "cache verify",
    "cache prune", "cache export", "bench loader", "bench io", "bench compare", "bench exchange",
    "bench importance", "verify", "simulate", "probe", "plan", "rehearse", "search", "ablate",
    "hardest", "rows", "runs", "evaluate", "feed", "certify", "export", "stats", "doctor",
)  # fmt: skip
ANY = "**"
OPTION = re.compile(r"--[a-z][a-z0-9-]*")


@dataclasses.dataclass
class Code:
    """What our sources define.

    Attributes:
        modules: By dotted name: what each defines, imports or assigns.
        members: By name of a class: what it defines and sets of itself.
        bases: By name of a class: the classes that it inherits from.
        arguments: By name of a class or function: what it takes; `ANY`: whatever it is given.
        options: ``--option`` of the programs in benchmarks/ and examples/.
        variables: ``TONARI_...`` of the environment.
    """

    modules: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    members: dict[str, set[str]] = dataclasses.field(default_factory=lambda: defaultdict(set))
    bases: dict[str, set[str]] = dataclasses.field(default_factory=lambda: defaultdict(set))
    arguments: dict[str, set[str]] = dataclasses.field(default_factory=lambda: defaultdict(set))
    options: set[str] = dataclasses.field(default_factory=set)
    variables: set[str] = dataclasses.field(default_factory=set)

    def family(self, owner: str) -> set[str]:
        """List a class and those of ours that it inherits from; empty: it is none of ours."""
        if owner not in self.members:
            return set()
        return {owner}.union(*(self.family(base) for base in self.bases[owner] - {owner}))

    def has_member(self, owner: str, name: str) -> bool:
        """Say whether a class has a member, or inherits it."""
        return any(name in self.members[each] for each in self.family(owner))

    def takes(self, name: str) -> set[str]:
        """List what a class or function takes."""
        return set().union(*(self.arguments[each] for each in {name} | self.family(name)))


@functools.cache
def our_code() -> Code:
    """Read every source file."""
    code = Code()
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        text, (*parts, stem) = path.read_text(), path.relative_to(ROOT).with_suffix("").parts
        tree = ast.parse(text)
        module = ".".join(parts if stem == "__init__" else [*parts, stem])
        code.modules[module] = set(_names(tree.body))
        if parts[:2] != ["tests", "docs"]:  # where names are misspelt to be found
            code.variables |= set(re.findall(r"\bTONARI_[A-Z_]+\b", text))
        if parts[0] in PROGRAMS:
            code.options |= set(OPTION.findall(text))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                code.arguments[node.name] |= _taken(node)
            elif isinstance(node, ast.ClassDef):
                _add_class(code, node, is_of_program=parts[0] in PROGRAMS)
    return code


def _add_class(code: Code, node: ast.ClassDef, *, is_of_program: bool) -> None:
    fields = {
        name for each in node.body if isinstance(each, ast.AnnAssign) for name in _names([each])
    }
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    made_by = (_taken(each) for each in functions if each.name in ("__init__", "__new__"))
    code.members[node.name] |= set(_names(node.body)) | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if isinstance(each.value, ast.Name) and each.value.id == "self"
    }
    code.arguments[node.name] |= fields.union(*made_by)
    code.bases[node.name] |= {
        ast.unparse(each).partition("[")[0].split(".")[-1] for each in node.bases
    }
    if is_of_program:  # tyro makes options of a class's fields
        code.options |= {f"--{name.replace('_', '-')}" for name in fields}


def _taken(function: ast.FunctionDef) -> set[str]:
    given = function.args
    named = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return named | ({ANY} if given.kwarg else set())


def _names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield what statements define, import or assign."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _names([*node.body, *getattr(node, "orelse", [])])


@functools.cache
def toml_tables() -> dict[str, set[str]]:
    """List the keys of the tables of a run, a study and a cluster, and of groups (data.cache)."""
    from tonari.ablate.study import TABLES, StudyConfig
    from tonari.oracle.cluster.cluster import Cluster
    from tonari.trainer.config.config import SECTIONS

    tables: dict[str, set[str]] = {name: set() for name in TABLES}
    for name, section in {**SECTIONS, "study": StudyConfig}.items():
        hints = get_type_hints(section)
        tables[name] = {each.name for each in dataclasses.fields(section)}
        for key in tables[name]:
            if dataclasses.is_dataclass(hints[key]):
                tables[f"{name}.{key}"] = {each.name for each in dataclasses.fields(hints[key])}
    for name in OF_KINDS:
        named = importlib.import_module(f"tonari.trainer.config.{name}").NAMED
        tables[name] |= named.all_settings()
    for name, made in get_type_hints(Cluster).items():
        for each in (made, *getattr(made, "__args__", ())):
            tables |= {name: set(getattr(each, "__struct_fields__", ()))} if each is not str else {}
    return tables


def has_key(dotted: str) -> bool:
    """Say whether a TOML file has a key, such as data.cache.quota, or a table of that name."""
    dotted = dotted.removeprefix("full.")
    if of_study := re.fullmatch(r"(?:train|arms\.\w+|grid\.\w+)(?:\.(.+))?", dotted):
        return not of_study[1] or has_key(of_study[1])
    tables, (table, _, key) = toml_tables(), dotted.rpartition(".")
    # The keys of `args` are those of a class that anybody may have written.
    return dotted in tables or key in tables.get(table, ()) or table.endswith(".args")


@functools.cache
def help_of(command: str) -> str:
    """Return what a command's --help prints, at 80 columns.

    Raises:
        ValueError: If it ends with a status other than 0.
    """
    from tonari.cli import main

    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR", "TERM")}
    os.environ.update(COLUMNS="80", NO_COLOR="1", TERM="dumb")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            status = main([*command.split(), "--help"])
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    if status:
        raise ValueError(f"tonari {command} --help ended with {status}, expected 0")
    return printed.getvalue().rstrip()


def options_of(command: str) -> set[str]:
    """List the options of a command."""
    return set(OPTION.findall(help_of(command)))
