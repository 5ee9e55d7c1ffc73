"""Torchvision's transforms, also of a wheel whose compiled operators do not load."""

import importlib
import sys

import pytest
import torch

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""What torchvision takes for granted as it is imported; no transform calls them."""

DEFINED: list[torch.library.Library] = []


def import_or_skip() -> None:
    """Make ``from torchvision.transforms import v2`` work, or skip the test."""
    pytest.importorskip("PIL")
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision: pip install tonari[transforms]")
    try:
        importlib.import_module("torchvision.transforms.v2")
    except RuntimeError:
        # A wheel built for CUDA beside a torch that is not.
        library = torch.library.Library("torchvision", "DEF")
        for operator in OPERATORS:
            library.define(operator)
        DEFINED.append(library)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        importlib.import_module("torchvision.transforms.v2")
