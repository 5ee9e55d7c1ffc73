"""Tensor-parallel plans of modules that bring their own: by torch's styles, or by name."""

import fnmatch
from collections.abc import Callable, Mapping

from torch import nn
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.styles import LocalPart

BY_NAME: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: LocalPart(gradient=Partial()),
}
"""Hugging Face's names of styles (``base_model_tp_plan`` of a configuration)."""


def styles_of(
    module: nn.Module, plan: Mapping[str, ParallelStyle | str]
) -> dict[str, ParallelStyle]:
    """Give each layer that a plan names its style.

    Args:
        module: The plan's paths begin here.
        plan: Path, ``*`` for any one name -> style, or its name.

    Raises:
        ConfigError: If a path is no layer's, or nobody knows the style.
    """
    found: dict[str, ParallelStyle] = {}
    names = [name for name, _ in module.named_modules() if name]
    for path, style in plan.items():
        if isinstance(style, str) and style not in BY_NAME:
            raise ConfigError(
                f'tp_plan: {path} has style "{style}", expected one of {", ".join(BY_NAME)} or '
                "a torch.distributed.tensor.parallel.ParallelStyle"
            )
        matched = [name for name in names if _matches(name, path)]
        if not matched:
            raise ConfigError(
                f"tp_plan: {path} names no layer of {type(module).__name__}; its layers are "
                f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            )
        for name in matched:
            found[name] = BY_NAME[style]() if isinstance(style, str) else style
    return found


def check_divides(module: nn.Module, plan: Mapping[str, ParallelStyle], tp: int) -> None:
    """Refuse a tp size that does not divide a linear layer that it splits.

    Raises:
        ConfigError: Names the layer.
    """
    for name, style in plan.items():
        layer = module.get_submodule(name)
        if isinstance(layer, nn.Linear) and isinstance(style, (ColwiseParallel, RowwiseParallel)):
            by_output = isinstance(style, ColwiseParallel)
            number = layer.out_features if by_output else layer.in_features
            if number % tp:
                raise ConfigError(
                    f"mesh.tp is {tp}, which does not divide the {number} "
                    f"{'outputs' if by_output else 'inputs'} of {name}; choose a mesh.tp that does"
                )


def _matches(name: str, path: str) -> bool:
    parts, patterns = name.split("."), path.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
