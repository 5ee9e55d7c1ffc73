"""What `tonari doctor` finds of the names that Tonari's packages are imported by."""

from importlib.metadata import distribution, packages_distributions

from tonari.checks import Finding
from tonari.names import HERE, INSTALLED, NAMES, describe, expected, origin, taken

AGAIN = "`pip install --force-reinstall --no-deps tonari`"


def check_names() -> Finding:
    """See that `import dataio` and the like lead to Tonari, and name whose file is in the way."""
    wrong = taken()
    if wrong:
        # Reads what all packages recorded, so it is done only now.
        owners = packages_distributions()
        parts = [(*describe(name, path), _of(owners.get(name, []))) for name, path in wrong.items()]
        found = ", and ".join(f"{found}{owner}" for found, _, owner in parts)
        return Finding("names", "look", found, "; ".join(cure for _, cure, _ in parts))
    absent = [name for name in NAMES if origin(name) is None]
    if absent:
        return Finding("names", "look", f"{expected(absent[0])} is not there", AGAIN)
    where = "installed below" if INSTALLED else "a checkout, beside"
    return Finding("names", "fine", f"{', '.join(NAMES)}: {where} {HERE}")


def _of(distributions: list[str]) -> str:
    others = sorted({name for name in distributions if name != "tonari"})
    named = ", ".join(f"{name} {distribution(name).version}" for name in others)
    return f" (of {named})" if named else ""
