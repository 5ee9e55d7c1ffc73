"""What a TOML file says of what `trainer.train` takes as arguments: a function that gives them."""

from dataclasses import dataclass, field

from tonari.trainer.config.settings import Section
from tonari.trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(Section):
    """A task, fields, a transform, an optimizer or a loss of your own.

    Attributes:
        kind: ``"package.module:name"``, a function that returns a dict of arguments of
            `trainer.train`, such as ``{"loss": ...}``.
        args: A table: the keyword arguments of that function.
    """

    kind: str = ""
    args: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind and ":" not in self.kind:
            raise ConfigError(
                f'recipe.kind is "{self.kind}", expected package.module:name, a function that '
                "returns arguments of trainer.train"
            )
        if self.args and not self.kind:
            raise ConfigError(
                "recipe.args is given without recipe.kind, which takes them; name a function, "
                "package.module:name"
            )
