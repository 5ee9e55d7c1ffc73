"""What a TOML file says of importance: a policy by its name, and settings of its own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, ClassVar, Literal, get_args

from dataio.base.checked import fits
from dataio.plan.policies import Importance, refresh_every
from importance import find_policy, make_policy, policies
from tonari.trainer.config.kinds import Named, check_args
from tonari.trainer.config.settings import Section, check_setting
from tonari.trainer.errors import ConfigError

BY_RATE = "lr"
"""Of ``drops``: where this run's learning rate has halved, see `importance.lr_drops`."""


def policy_of(
    named: Named, kind: str, given: Mapping[str, object], args: Mapping[str, object], *,
    beside: Iterable[str], defaults: Mapping[str, object],
) -> Importance:  # fmt: skip
    """Make a policy as a file says; TOML has no None: 0 or ``""`` stand for it.

    Args:
        named: The key that names it.
        kind: One of `importance.policies`, or a class of the user's.
        given: Settings of one of these, as in the file.
        args: What a class of the user's is made with.
        beside: The table's own keys.
        defaults: Settings in place of the class's own defaults, where it takes them.

    Raises:
        ConfigError: If there is no such policy, it takes no such setting, or a value is out of
            range.
    """
    if is_own(kind):
        named.check_args_alone(kind, given)
        try:
            check_args(named.table, find_policy(kind), args)
        except ValueError as error:
            raise ConfigError(f"{named.key}: {error}") from error
        return _made(named, kind, args)
    named.check_kind(kind)
    named.check_no_args(kind, args)
    takes = named.takes(kind)
    given = {
        name: None if _is_none(value, takes.get(name)) else value for name, value in given.items()
    }
    made = named.make_settings(kind, given, beside=beside)
    return _made(named, kind, {**{k: v for k, v in defaults.items() if k in takes}, **made})


def is_own(kind: str) -> bool:
    """Whether a policy is a class of the user's."""
    return ":" in kind


def _made(named: Named, kind: str, settings: Mapping[str, Any]) -> Importance:
    try:
        return make_policy(kind, **settings)
    except ValueError as error:
        raise ConfigError(f"[{named.table}]: {error}") from error


def _is_none(value: object, hint: object) -> bool:
    return value in (0, "") and NoneType in get_args(hint) and fits(value, hint, roughly=True)


@dataclass(frozen=True, kw_only=True)
class ImportanceConfig(Section):
    """Which rows an epoch leaves out, or draws: one of `importance.policies`, and its own settings.

    Of a policy of this package, the keys beside ``kind`` are what its class takes, and default to
    what the class has; 0 or ``""`` stand for None. ``drops`` "lr": where this run's learning rate
    has halved (`importance.lr_drops`). ``warmup_epochs`` defaults to those of the optimizer.

    Attributes:
        kind: The policy, or ``"package.module:Class"``, one of your own.
        args: A table: the keyword arguments of a policy of your own.
    """

    REST: ClassVar[str] = "settings"

    kind: str = "full"
    args: dict[str, object] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_own:
            NAMED.check_args_alone(self.kind, self.settings)
            return
        NAMED.check_kind(self.kind)
        drops, takes = self.settings.get("drops"), NAMED.takes(self.kind)
        if isinstance(drops, str) and "drops" in takes:
            check_setting("importance.drops", drops, takes["drops"] | Literal["lr"])
        self._draft()

    @property
    def is_own(self) -> bool:
        """Whether the policy is a class of the user's."""
        return is_own(self.kind)

    @property
    def drops_by_rate(self) -> bool:
        """Whether the policy's drops are those of the learning rate."""
        return self.settings.get("drops") == BY_RATE and "drops" in NAMED.takes(self.kind)

    @property
    def rescores(self) -> bool:
        """Whether the policy gives hidden rows new scores; not known of a class of the user's."""
        return not self.is_own and refresh_every(self._draft()) is not None

    def make(self, *, warmup_epochs: int | None = None, drops: tuple[int, ...] = ()) -> Importance:
        """Make the policy.

        Args:
            warmup_epochs: Of the learning rate, for a policy that goes by them.
            drops: Epochs in which the learning rate drops, for one that goes by these.

        Raises:
            ConfigError: If it is a class of the user's that is not found, or a setting is wrong.
        """
        given = self.settings
        if self.drops_by_rate:
            # A rate that halves less often than there are alphas leaves the last ones out.
            given = {**given, "drops": drops, "alphas": self._alphas[: len(drops) + 1]}
        defaults = {} if warmup_epochs is None else {"warmup_epochs": warmup_epochs}
        return policy_of(NAMED, self.kind, given, self.args, beside=KEYS, defaults=defaults)

    @property
    def _alphas(self) -> tuple[float, ...]:
        return tuple(self.settings.get("alphas", NAMED.default(self.kind, "alphas")))

    def _draft(self) -> Importance:
        """Make the policy without what follows from the run's schedule."""
        if not self.drops_by_rate:
            return self.make()
        others = {name: its for name, its in self.settings.items() if name != "drops"}
        NAMED.make_settings(self.kind, others, beside=KEYS)
        return self.make(drops=tuple(range(1, len(self._alphas))))


KEYS = ("kind", "args")
"""The table's own."""

NAMED = Named(key="importance.kind", kinds=policies())
