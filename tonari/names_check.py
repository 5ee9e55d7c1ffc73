"""What `tonari doctor` finds of the names that Tonari's packages are imported by."""

from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from tonari.checks import Finding
from tonari.names import HERE, NAMES, describe, expected, origin, taken

AGAIN = "`pip install --force-reinstall --no-deps` with the wheel file, or `.` in a checkout"


def check_names() -> Finding:
    """See that `import dataio` and the like lead to Tonari, and name whose file is in the way."""
    wrong = taken()
    # What all packages recorded, which a start does not read.
    owners = packages_distributions()
    if wrong:
        parts = [(*describe(name, path), _of(owners.get(name, []))) for name, path in wrong.items()]
        found = ", and ".join(f"{found}{owner}" for found, _, owner in parts)
        return Finding("names", "look", found, "; ".join(cure for _, cure, _ in parts))
    for name in NAMES:
        if others := _that_own(expected(name), owners.get(name, [])):
            found = f"{expected(name)}, Tonari's, is a file of another package too{_of(others)}"
            cure = f"uninstall that package, whose own code imports Tonari's now, then run {AGAIN}"
            return Finding("names", "look", found, cure)
    absent = [name for name in NAMES if origin(name) is None]
    if absent:
        return Finding("names", "look", f"{expected(absent[0])} is not there", AGAIN)
    return Finding("names", "fine", f"{', '.join(NAMES)}: beside {HERE}")


def _that_own(path: Path, distributions: list[str]) -> list[str]:
    """Choose the distributions, other than Tonari's, that recorded this very file."""
    return [
        name
        for name in distributions
        if name != "tonari"
        and any(Path(str(file.locate())) == path for file in distribution(name).files or [])
    ]


def _of(distributions: list[str]) -> str:
    others = sorted({name for name in distributions if name != "tonari"})
    named = ", ".join(f"{name} {distribution(name).version}" for name in others)
    return f" (of {named})" if named else ""
