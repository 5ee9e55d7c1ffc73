"""Has the house grown? Figures of how much a reader has to follow, beside their limits.

    python -m benchmarks.ratchet [--write]

The limits stand in `ratchet.toml`. A figure may fall, and ``--write`` then lowers its limit. It
rises only with an entry under ``raised`` that names the decision record which says why.
"""

import argparse
import inspect
import re
from pathlib import Path

import tomllib

from benchmarks.minimal_run import count_ours
from benchmarks.names import ROOT, doubled_names
from dataio import Loader

LIMITS = Path(__file__).with_suffix(".toml")
CODE = ("benchmarks", "dataio", "importance", "shuffle", "tonari")


def figures() -> dict[str, int]:
    """Measure everything that is limited. Takes seconds: it trains the minimal run."""
    code = (path for package in CODE for path in (ROOT / package).rglob("*.*"))
    lines = {path: _lines(path) for path in code if path.suffix in (".py", ".c")}
    run = count_ours()
    return {
        "minimal_run_files": len(run),
        "minimal_run_functions": sum(map(len, run.values())),
        "doubled_class_names": len(doubled_names()),
        "lines": sum(lines.values()),
        "test_lines": sum(map(_lines, (ROOT / "tests").rglob("*.py"))),
        "longest_file_lines": max(lines.values()),
        "loader_keywords": len(inspect.signature(Loader).parameters) - 1,
    }


def _lines(path: Path) -> int:
    return sum(1 for line in path.read_text().splitlines() if line.strip())


def limits() -> dict[str, int]:
    """Read how large each figure may be: what it began with, and what was added to it since.

    Raises:
        ValueError: If what was added names no decision record that speaks of the figure.
    """
    found = tomllib.loads(LIMITS.read_text())
    allowed: dict[str, int] = dict(found["limits"])
    for entry in found.get("raised", []):
        records = list((ROOT / "docs" / "adr").glob(f"{entry['adr']:04d}-*.md"))
        if not records or entry["figure"] not in records[0].read_text():
            raise ValueError(
                f"{LIMITS}: {entry['figure']} is raised by decision record {entry['adr']}, "
                "expected a file in docs/adr of that number which names the figure; write it"
            )
        allowed[entry["figure"]] += entry["by"]
    return allowed


def main() -> None:
    """Print each figure beside its limit."""
    parser = argparse.ArgumentParser(description="Compare figures of the code with their limits.")
    parser.add_argument("--write", action="store_true", help="lower the limits that were undercut")
    options = parser.parse_args()
    allowed, text = limits(), LIMITS.read_text()
    for name, figure in figures().items():
        print(f"{name:24}{figure:8,}  limit {allowed[name]:8,}")
        if options.write and figure < allowed[name]:
            change = figure - allowed[name]
            text = re.sub(
                rf"(?m)^{name} = (\d+)$",
                lambda line, by=change, key=name: f"{key} = {int(line[1]) + by}",  # type: ignore[misc]
                text,
            )
    LIMITS.write_text(text)


if __name__ == "__main__":
    main()
