"""Write versions and bounds of pyproject.toml and constraints.txt into the recipes.

    python packaging/render.py           # after a change of either
    python packaging/render.py --check   # says which recipe is behind; changes nothing

The conda recipe reads pyproject.toml itself.
"""

import re
import sys
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[1]
START, END = (
    r"( *# Written by packaging/render\.py from [^\n]*:\n)",
    r"( *# End of what was written\.)",
)
# What a site's own modules bring.
MODULES = frozenset({"torch", "numpy", "pyarrow", "pillow", "scipy", "mpi4py"})


def main() -> int:
    """Render every recipe; returns the exit status."""
    behind = [path for path, text in rendered().items() if path.read_text() != text]
    if "--check" not in sys.argv[1:]:
        for path, text in rendered().items():
            path.write_text(text)
    elif behind:
        names = ", ".join(str(path.relative_to(ROOT)) for path in behind)
        print(f"{names}: not as pyproject.toml says; run `python packaging/render.py`")
        return 1
    return 0


def rendered() -> dict[Path, str]:
    """Tell what each recipe has to hold."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    blocks = {
        ROOT / "packaging" / "spack" / "package.py": _spack(project),
        ROOT / "packaging" / "easybuild" / "Tonari.eb": _easybuild(project, pins),
    }
    return {path: _replaced(path.read_text(), lines) for path, lines in blocks.items()}


def _replaced(text: str, lines: list[str]) -> str:
    block = "".join(f"{line}\n" for line in lines)
    text, num_blocks = re.subn(
        f"{START}.*?{END}", lambda found: found[1] + block + found[2], text, flags=re.DOTALL
    )
    assert num_blocks == 1
    return text


def _spack(project: dict[str, Any]) -> list[str]:
    extras = project["optional-dependencies"]
    run = '    depends_on("{}", type=("build", "run"){})'.format
    lines = [run(f"python{_spack_range(project['requires-python'])}", "")]
    for when, dependencies in (
        ("", project["dependencies"]),
        (', when="+mpi"', extras["mpi"]),
        (', when="+cli"', extras["cli"]),
    ):
        for dependency in dependencies:
            name, bounds = parted(dependency)
            spack = "py-" + name.lower().replace("_", "-")
            below = re.search(r"python_version < '3\.(\d+)'", dependency)
            only = f', when="^python@:3.{int(below[1]) - 1}"' if below else when
            lines.append(run(spack + _spack_range(bounds), only))
    builds = ("c", "py-setuptools@77:")
    return [*lines, *(f'    depends_on("{name}", type="build")' for name in builds)]


def _spack_range(bounds: str) -> str:
    """Write ">=1.2,<3" as Spack does: "@1.2:2", both ends within."""
    found = re.fullmatch(r">=([\d.]+)(?:,<([\d.]+))?", bounds)
    assert found, bounds
    least, most = found.groups()
    if most is None:
        return f"@{least}:"
    parts = [int(part) for part in most.split(".")]
    parts[-1] -= 1
    return f"@{least}:{'.'.join(map(str, parts))}"


def _easybuild(project: dict[str, Any], pins: dict[str, str]) -> list[str]:
    pinned = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    names = [
        parted(d)[0] for d in project["dependencies"] + project["optional-dependencies"]["cli"]
    ]
    extensions = [
        f'    ("{name}", "{pinned[name.lower().replace("_", "-")]}"),'
        for name in names
        if name.lower() not in MODULES and name.lower().replace("_", "-") in pinned
    ]
    return [f'version = "{project["version"]}"', "local_from_package_index = [", *extensions, "]"]


def parted(dependency: str) -> tuple[str, str]:
    """Split "name>=1,<2; marker" into its name and bounds."""
    found = re.match(r"([\w.-]+)(>=[^;\s]+)", dependency)
    assert found, dependency
    return found[1], found[2]


if __name__ == "__main__":
    sys.exit(main())
