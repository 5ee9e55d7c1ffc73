"""What to train: a kind of model, and its own settings."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, ClassVar, get_args, get_origin

from dataio.base.checked import Count, Positive
from tonari.trainer.config.kinds import Named, hints_of
from tonari.trainer.config.settings import Section, checked_setting
from tonari.trainer.models import GPT, Llama, ResNet, ResNet50, SmallCNN, StagedModel, ViT

MODELS: dict[str, type[StagedModel]] = {
    "small_cnn": SmallCNN, "resnet": ResNet, "resnet50": ResNet50, "vit": ViT, "gpt": GPT,
    "llama": Llama,
}  # fmt: skip
"""The models of the trainer; what a file may set of one is what its class takes."""

TEXT_MODELS = tuple(kind for kind, its in MODELS.items() if "sequence_length" in hints_of(its))
"""Kinds that read tokens."""

GIVEN = "own"
"""The kind of model that the caller of `trainer.train` gives."""

NAMED = Named(
    key="model.kind",
    kinds=MODELS,
    elsewhere={"in_channels": "data.channels", "sequence_length": "data.sequence_length"},
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """What to train; a setting defaults to what the model has.

    Of a model of this package, the keys beside these are what its class takes, such as
    ``num_classes``. Of a model of your own, a key ``layers`` says where its blocks are, for
    mesh.pp: see `tonari.trainer.models.Adapted`.

    Attributes:
        kind: A model of this package; or ``"package.module:name"``, a class or function of your
            own that makes any ``torch.nn.Module``. ``"own"``, the kind of a file without this
            table, is what `trainer.train` is given.
        args: A table: what a class or function of your own is called with.
        weights: Weights to start from: a ``.safetensors`` file, or a directory in Hugging Face's
            layout, of whose ``config.json`` a llama takes the sizes that are not given.
    """

    REST: ClassVar[str] = "settings"

    kind: str = "small_cnn"
    args: dict[str, object] = field(default_factory=dict)
    weights: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_own:
            NAMED.check_args_alone(self.kind, self.settings, beside=["layers"])
            layers = self.settings.get("layers")
            checked_setting("model.layers", layers, str | tuple[str, ...] | None)
            return
        NAMED.check_kind(self.kind)
        NAMED.check_no_args(self.kind, self.args)
        hints = {name: _above_zero(hint) for name, hint in NAMED.takes(self.kind).items()}
        made = NAMED.make_settings(
            self.kind, self.settings, hints=hints, beside=("kind", "args", "weights")
        )
        object.__setattr__(self, "settings", made)

    @property
    def is_own(self) -> bool:
        """Whether the model is none of the trainer's."""
        return self.kind == GIVEN or ":" in self.kind

    @property
    def layers(self) -> str | tuple[str, ...] | None:
        """Where the blocks of a model of the user's are; None: as it says."""
        layers = self.settings.get("layers") if self.is_own else None
        return tuple(layers) if isinstance(layers, list) else layers

    def with_settings(self, **settings: object) -> "ModelConfig":
        """Change some settings of the model."""
        return dataclasses.replace(self, settings=self.settings | settings)


def _above_zero(hint: Any) -> Any:
    """Say of numbers that they are above 0: those of a model are sizes."""
    if hint in (int, float):
        return Count if hint is int else Positive
    options = get_args(hint)
    if get_origin(hint) is Sequence:
        return Sequence[_above_zero(options[0])]  # type: ignore[misc]
    if NoneType in options:
        return functools.reduce(operator.or_, map(_above_zero, options))
    return hint
