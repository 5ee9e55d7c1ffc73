"""What a TOML file says of the shuffle: a policy by its name, and settings of its own."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from dataio.plan.policies import Shuffle
from shuffle import Global, Local, Partial
from tonari.trainer.config.kinds import Named
from tonari.trainer.config.settings import Section
from tonari.trainer.errors import ConfigError

SHUFFLES: dict[str, type[Shuffle]] = {"local": Local, "partial": Partial, "global": Global}

NAMED = Named(key="shuffle.kind", kinds=SHUFFLES)


@dataclass(frozen=True, kw_only=True)
class ShuffleConfig(Section):
    """Which node holds which row, and the settings of the shuffle that says so.

    The keys beside ``kind`` are what its class takes.

    Attributes:
        kind: The shuffle; left out: the one that takes the keys that are given, so that
            ``exchange`` alone is partial, and without any local.
    """

    REST: ClassVar[str] = "settings"

    kind: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.kind:
            takes = (kind for kind in SHUFFLES if self.settings.keys() & NAMED.takes(kind).keys())
            object.__setattr__(self, "kind", next(takes, "local"))
        self.make()

    def make(self) -> Shuffle:
        """Make the policy."""
        NAMED.check_kind(self.kind)
        settings = NAMED.make_settings(self.kind, self.settings, beside=("kind",))
        try:
            return SHUFFLES[self.kind](**settings)
        except ValueError as error:
            raise ConfigError(f"[shuffle]: {error}") from error
