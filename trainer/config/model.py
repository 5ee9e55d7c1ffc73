"""What to train: a kind of model, and its own settings."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from trainer.config.settings import Count, Positive, Section
from trainer.errors import ConfigError
from trainer.models.rotary import Rope

MODEL_KEYS = {
    "small_cnn": ("num_classes", "image_size"),
    "resnet": ("num_classes", "image_size", "depth", "norm"),
    "resnet50": ("num_classes", "image_size"),
    "vit": (
        "num_classes", "image_size", "patch", "width", "depth", "heads", "pooling", "norm_eps",
    ),
    "gpt": ("width", "depth", "heads", "vocabulary"),
    "llama": (
        "vocabulary", "width", "depth", "heads", "kv_heads", "inner_width", "head_width", "rope",
        "norm_eps", "tied",
    ),
}  # fmt: skip
"""What each kind of model takes; all take ``weights``."""

TEXT_MODELS = ("gpt", "llama")
"""Kinds that read tokens."""

GIVEN = "own"
"""The kind of model that the caller of `trainer.train` gives."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """What to train; what is left out is as the model has it. ``MODEL_KEYS``: who takes what.

    ``weights`` are those to start from: a ``.safetensors`` file, or a directory in Hugging Face's
    layout; of its ``config.json`` a llama takes the sizes that are not given.

    A kind ``"package.module:name"`` is a class or function of your own, which is called with
    ``args`` and makes any ``torch.nn.Module``; ``layers`` says where its blocks are, for mesh.pp:
    see `trainer.models.Adapted`. ``"own"``, the kind of a file without this table, is what
    `trainer.train` is given.
    """

    kind: str = "small_cnn"
    args: dict[str, object] = field(default_factory=dict)
    layers: str | tuple[str, ...] | None = None
    weights: str = ""
    num_classes: Count | None = None
    image_size: Count | None = None
    patch: Count | None = None
    width: Count | None = None
    depth: Count | None = None
    heads: Count | None = None
    norm: Literal["batch", "group"] | None = None
    pooling: Literal["mean", "token"] | None = None
    vocabulary: Count | None = None
    kv_heads: Count | None = None
    inner_width: Count | None = None
    head_width: Count | None = None
    rope: Rope = field(default_factory=Rope)
    norm_eps: Positive | None = None
    tied: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.is_own or self.kind in MODEL_KEYS):
            raise ConfigError(
                f"model.kind is {self.kind!r}, expected one of "
                f"{', '.join(map(repr, MODEL_KEYS))}, or package.module:name of your own; correct "
                "it in the file, or give model.kind=VALUE on the command line"
            )
        takes = ("args", "layers") if self.is_own else MODEL_KEYS[self.kind]
        for name in self.settings:
            if name not in takes:
                raise ConfigError(
                    f'model.{name} is given, but model.kind "{self.kind}" takes '
                    f"{', '.join(takes)} only; leave it out, or give another model.kind"
                )
        if "num_classes" in takes and self.num_classes is None:
            raise ConfigError(
                "model.num_classes is missing; set it in the file or give model.num_classes=VALUE"
            )
        if self.kind == "resnet" and self.depth and (self.depth < 8 or self.depth % 6 != 2):
            raise ConfigError(
                f"model.depth is {self.depth}, expected 6 n + 2 layers; choose 8, 14, 20, 32 or 56"
            )

    @property
    def is_own(self) -> bool:
        """Whether the model is none of the trainer's."""
        return self.kind == GIVEN or ":" in self.kind

    @property
    def settings(self) -> dict[str, object]:
        """What was given beside the kind and the weights."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        beside = ("kind", "weights")
        return {k: v for k, v in given.items() if k not in beside and v not in (None, Rope(), {})}
