"""Make a policy by its name, as settings files do."""

import difflib
from dataclasses import fields

from dataio.plan.policies import Importance
from importance.full import Full
from importance.infobatch import InfoBatch
from importance.kakurenbo import Kakurenbo
from importance.random import RandomPrune
from importance.selective_backprop import SelectiveBackprop
from importance.weighted import Weighted

POLICIES: dict[str, type[Importance]] = {
    "full": Full,
    "kakurenbo": Kakurenbo,
    "infobatch": InfoBatch,
    "selective_backprop": SelectiveBackprop,
    "random": RandomPrune,
    "weighted": Weighted,
}


def make_policy(name: str, **settings: object) -> Importance:
    """Make a policy.

    Args:
        name: One of `POLICIES`.
        settings: Its arguments.

    Raises:
        ValueError: If there is no such policy, it takes no such setting, or a value is out of
            range.
    """
    _check_known("importance", name, list(POLICIES))
    made_by = POLICIES[name]
    known = [field.name for field in fields(made_by)]  # type: ignore[arg-type]
    for setting in settings:
        _check_known(f"importance {name!r}: setting", setting, known)
    return made_by(**settings)


def _check_known(what: str, name: str, known: list[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{what} {name!r} is unknown, expected one of {', '.join(known)}{hint}")
