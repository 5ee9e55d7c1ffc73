"""How long tests take: files that take longest begin first, and `make test` is of quick tests.

It lies in `durations.json`, written by `pytest --store-durations`: seconds by the name of the test,
of those that take some.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

PATH = Path(__file__).with_name("durations.json")
LEAST_S = 0.5
"""Quicker tests are not stored: they fill what is left at the end."""

Item = TypeVar("Item")


def read(path: Path = PATH) -> dict[str, float]:
    """Read what is stored; nothing where there is no file."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def longest_first(
    items: Iterable[tuple[str, Item]], durations_s: Mapping[str, float]
) -> list[Item]:
    """Sort named tests by what all tests of their file take, so that no worker is left with one.

    Files stay whole, as their tests share fixtures.
    """
    named = list(items)
    files_s: dict[str, float] = defaultdict(float)
    for name, _ in named:
        files_s[_file(name)] += durations_s.get(name, 0.0)
    # Stable: tests of a file stay together, and so do files of which nothing is known.
    order = {file: place for place, file in enumerate(dict.fromkeys(_file(n) for n, _ in named))}
    named.sort(key=lambda one: (-files_s[_file(one[0])], order[_file(one[0])]))
    return [item for _, item in named]


def store(measured_s: Mapping[str, float], path: Path = PATH) -> None:
    """Put what was measured in the place of what was stored; of other tests that stays."""
    kept = {name: seconds for name, seconds in read(path).items() if name not in measured_s}
    new = {name: round(s, 1) for name, s in measured_s.items() if s >= LEAST_S}
    path.write_text(json.dumps(dict(sorted((kept | new).items())), indent=0) + "\n")


def _file(name: str) -> str:
    return name.split("::")[0]
