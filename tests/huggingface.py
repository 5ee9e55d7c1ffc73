"""Hugging Face's transformers, also beside a torchvision whose compiled operators do not load."""

import importlib.util

import pytest

from tests import torchvision_v2


def import_or_skip() -> None:
    """Make ``import transformers`` work, or skip the test."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install tonari[hf]")
    if importlib.util.find_spec("torchvision") is not None:
        # It imports torchvision where it finds it.
        torchvision_v2.import_or_skip()
