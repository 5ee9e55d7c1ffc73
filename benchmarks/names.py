"""Which class names stand for more than one thing?

Every class of our packages counts, private ones and those inside functions included; tests do not.

    python -m benchmarks.names
"""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("benchmarks", "dataio", "importance", "shuffle", "tonari")


def doubled_names() -> dict[str, list[str]]:
    """List the names of classes that are defined more than once, each with the places."""
    places = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def main() -> None:
    """Print the names and their number."""
    doubled = doubled_names()
    for name, places in doubled.items():
        print(f"{name}: {', '.join(places)}")
    print(f"{len(doubled)} names of classes are defined more than once")


if __name__ == "__main__":
    main()
