"""What a TOML file says of importance: a policy by its name, and settings of its own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from dataio.plan.policies import Importance, refresh_every
from importance import find_policy, make_policy, policies
from trainer.config.kinds import Named, check_args
from trainer.config.settings import Section, check_setting
from trainer.errors import ConfigError

BY_RATE = "lr"
"""Of ``drops``: where this run's learning rate has halved, see `importance.lr_drops`."""


def make_named_policy(
    named: Named, kind: str, given: Mapping[str, object], *, beside: Iterable[str] = (),
    **settings: object,
) -> Importance:  # fmt: skip
    """Make a policy of the package as a file says; TOML has no None: 0 or ``""`` stand for it.

    Args:
        named: The key that names it.
        kind: Its name.
        given: Its settings, as in the file.
        beside: The table's own keys.
        settings: Settings above those of the file.

    Raises:
        ConfigError: If there is no such policy, it takes no such setting, or a value is out of
            range.
    """
    named.check_kind(kind)
    takes = named.takes(kind)
    made = named.make_settings(kind, given, beside=beside)
    made = {name: None if _is_none(value, takes[name]) else value for name, value in made.items()}
    return _made(named, kind, made | settings)


def make_own_policy(named: Named, kind: str, args: Mapping[str, object]) -> Importance:
    """Make a policy of a class of the user's.

    Raises:
        ConfigError: If it is not found, or does not take these arguments.
    """
    try:
        made_by = find_policy(kind)
    except ValueError as error:
        raise ConfigError(f"{named.key}: {error}") from error
    check_args(named.table, made_by, args)
    return _made(named, kind, args)


def _made(named: Named, kind: str, settings: Mapping[str, Any]) -> Importance:
    try:
        return make_policy(kind, **settings)
    except ValueError as error:
        raise ConfigError(f"[{named.table}]: {error}") from error


def _is_none(value: object, hint: object) -> bool:
    options = get_args(hint)
    return type(None) in options and type(value) in options and value in (0, "")


@dataclass(frozen=True, kw_only=True)
class ImportanceConfig(Section):
    """Which rows an epoch leaves out, or draws: one of `importance.policies`, and its own settings.

    Of a policy of this package, the keys beside ``kind`` are what its class takes, and default to
    what the class has; 0 or ``""`` stand for None. ``drops`` "lr": where this run's learning rate
    has halved (`importance.lr_drops`). ``warmup_epochs`` defaults to those of the optimizer.

    A kind ``"package.module:Class"`` is a policy of your own, which takes the table ``args`` as
    keyword arguments.
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
        NAMED.check_no_args(self.kind, self.args)
        drops = self.settings.get("drops")
        if isinstance(drops, str) and "drops" in self.takes:
            check_setting("importance.drops", drops, self.takes["drops"] | Literal["lr"])
        self._draft()

    @property
    def is_own(self) -> bool:
        """Whether the policy is a class of the user's."""
        return ":" in self.kind

    @property
    def takes(self) -> dict[str, Any]:
        """What may be set of the policy, and of which types."""
        return NAMED.takes(self.kind)

    @property
    def drops_by_rate(self) -> bool:
        """Whether the policy's drops are those of the learning rate."""
        return self.settings.get("drops") == BY_RATE

    @property
    def alphas(self) -> tuple[float, ...]:
        """What follows the drops, of a policy that has them."""
        return tuple(self.settings.get("alphas", NAMED.default(self.kind, "alphas")))

    @property
    def rescores(self) -> bool:
        """Whether the policy gives hidden rows new scores; not known of a class of the user's."""
        return not self.is_own and refresh_every(self._draft()) is not None

    def make(self, **settings: object) -> Importance:
        """Make the policy, with some settings above those given.

        Raises:
            ConfigError: If it is a class of the user's that is not found, or it does not take them.
        """
        if self.is_own:
            return make_own_policy(NAMED, self.kind, self.args)
        given = {name: its for name, its in self.settings.items() if name not in settings}
        return make_named_policy(NAMED, self.kind, given, beside=KEYS, **settings)

    def _draft(self) -> Importance:
        """Make the policy without what follows from the run's schedule."""
        given = self.settings
        if self.drops_by_rate:
            given = {name: its for name, its in given.items() if name != "drops"}
            NAMED.make_settings(self.kind, given, beside=KEYS)
            given = {name: its for name, its in given.items() if name != "alphas"}
        return make_named_policy(NAMED, self.kind, given, beside=KEYS)


KEYS = ("kind", "args")
"""The table's own."""

NAMED = Named(key="importance.kind", kinds=policies())
