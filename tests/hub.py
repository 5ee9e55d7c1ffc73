"""Hugging Face's transformers, also beside a torchvision whose compiled operators do not load."""

import importlib
import importlib.util
from typing import Any

import pytest

from tests import torchvision_v2


def import_or_skip() -> Any:
    """Import transformers, or skip the test: ``pip install 'tonari[hf]'``."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install 'tonari[hf]'", allow_module_level=True)
    if importlib.util.find_spec("torchvision") is not None:
        torchvision_v2.import_or_skip()
    return importlib.import_module("transformers")
