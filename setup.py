"""Builds the wheel: all packages below `tonari`, and a file for each public one. See ADR 0020.

A checkout, and an editable install of it, has `dataio/` and the others at the top, where they are
read and edited. A wheel must not: other distributions own these names too, and pip lets the last
one win. There `dataio` is `tonari.dataio`, its code imports `tonari.dataio`, and `dataio.py` is
one line.
"""

import ast
import shutil
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PARTS = ("dataio", "importance", "shuffle", "trainer", "oracle", "benchmarks")
PUBLIC = PARTS[:3]

STANDS_FOR = '''"""`{name}` is `tonari.{name}`: the same modules. See `tonari.names`."""

import sys

from tonari import {name} as module

sys.modules[__name__] = module
'''
STUB = "from tonari.{name} import *\n"
"""Types of a module by its short name; checkers do not run the file above."""


def below_tonari(source: str, path: str) -> str:
    """Rewrite import statements of our packages as those of `tonari`'s; no other text changes.

    Raises:
        ValueError: If an import has a form that could not keep the names that it binds.
    """
    lines = source.encode().splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_ours(node.module):
            old, new = f"from {node.module}", f"from tonari.{node.module}"
        elif isinstance(node, ast.Import) and any(_is_ours(name.name) for name in node.names):
            (name,) = node.names if len(node.names) == 1 else (None,)
            if name is None or "." in name.name:
                raise ValueError(
                    f"{path}:{node.lineno}: {ast.unparse(node)!r} cannot be moved below tonari; "
                    "import one package a line, and modules as `from package import module`"
                )
            old, new = f"import {name.name}", f"from tonari import {name.name}"
        else:
            continue
        line, at = lines[node.lineno - 1], node.col_offset
        if not line[at:].startswith(old.encode()):
            raise ValueError(f"{path}:{node.lineno}: expected {old!r} with single spaces")
        lines[node.lineno - 1] = line[:at] + new.encode() + line[at + len(old.encode()) :]
    return b"".join(lines).decode()


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] in PARTS


class BuildBelowTonari(build_py):  # type: ignore[misc]
    """Copies all packages to where a wheel has them."""

    def build_module(self, module: str, module_file: str, package: str) -> tuple[str, bool]:
        """Copy one module, its imports rewritten."""
        copied = Path(super().build_module(module, module_file, package)[0])
        copied.write_text(below_tonari(copied.read_text("utf-8"), module_file), "utf-8")
        return str(copied), True

    def find_modules(self) -> list[tuple[str, str, str]]:
        """List no file of the checkout for `dataio.py` and the others: they are written here."""
        return []

    def build_modules(self) -> None:
        """Write what stands for the public packages, and their types."""
        for path, text in self._written().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")

    def build_package_data(self) -> None:
        """Copy the examples too, which messages and documentation name."""
        super().build_package_data()
        for path, copy in self._examples().items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """List all files of the wheel."""
        more = [*self._written(), *self._examples().values()]
        return [*super().get_outputs(include_bytecode), *map(str, more)]

    def _written(self) -> dict[Path, str]:
        below = Path(self.build_lib)
        files = {below / f"{name}.py": STANDS_FOR.format(name=name) for name in PUBLIC}
        for name in PUBLIC:
            for path in Path(name).rglob("*.py"):
                module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
                stub = below / f"{name}-stubs" / path.relative_to(name).with_suffix(".pyi")
                files[stub] = STUB.format(name=module)
        return files

    def _examples(self) -> dict[Path, Path]:
        paths = [path for path in Path("examples").rglob("*") if path.is_file()]
        kept = [path for path in paths if "__pycache__" not in path.parts]
        return {path: Path(self.build_lib) / "tonari" / path for path in kept}


ours = find_packages(include=[f"{part}{rest}" for part in PARTS for rest in ("", ".*")])
own = find_packages(include=["tonari", "tonari.*"])
if "editable_wheel" in sys.argv:
    setup(packages=own + ours)
else:
    setup(
        packages=own + [f"tonari.{name}" for name in ours],
        package_dir={f"tonari.{part}": part for part in PARTS},
        py_modules=PUBLIC,
        cmdclass={"build_py": BuildBelowTonari},
    )
