"""docs/from_dataloader.md: both recipes train the same, ours is not longer, and one goes on."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as PillowImage

from tests import torchvision_v2
from tests.multirank import ROOT

PAGE = (ROOT / "docs" / "from_dataloader.md").read_text()
BLOCKS = [block.split("```")[0] for block in PAGE.split("```python\n")[1:]]
NUM_VAL = 13


def num_lines(block: str) -> int:
    """Count lines that are not blank."""
    return sum(bool(line.strip()) for line in block.splitlines())


def num_statements(block: str) -> int:
    """Count what the layout of lines does not change."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(block)))


def test_the_recipe_is_at_most_as_many_lines_as_with_a_dataloader():
    theirs, ours, _ = BLOCKS
    assert "DataLoader(" in theirs
    assert "dataio.Loader(" in ours
    assert num_lines(ours) <= num_lines(theirs)
    assert num_statements(ours) <= num_statements(theirs)
    named = [int(number) for number in re.findall(r"(\d+) lines", PAGE)]
    assert named == [num_lines(theirs), num_lines(ours)], "the page names its own numbers"


@pytest.fixture
def given(tmp_path, monkeypatch):
    """What the page takes as given, and pictures where its blocks look for them."""
    for split, count in (("train", 24), ("val", NUM_VAL)):
        for i in range(count):
            path = tmp_path / "pictures" / split / ("cat" if i % 2 else "dog") / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(i).integers(0, 256, (40 + i, 48, 3), np.uint8)
            PillowImage.fromarray(pixels).save(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    shapes = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(3, 2)

        def forward(self, images):
            shapes.append((self.training and torch.is_grad_enabled(), tuple(images.shape)))
            return self.last(images.mean((2, 3)) / 255)

    model = Model()
    return {
        "__name__": "__main__", "model": model, "device": "cpu", "batch_size": 8, "num_epochs": 2,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1), "rank": 0, "world_size": 1,
        "workers": 0, "shapes": shapes,
    }  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS[:2], ids=["DataLoader", "Tonari"])
def test_both_recipes_train_and_evaluate_the_same_numbers_of_pictures(given, block):
    if "torchvision" in block:
        torchvision_v2.import_or_skip()
    before = given["model"].last.weight.clone()
    exec(compile(block, "docs/from_dataloader.md", "exec"), given)
    assert [shape for trains, shape in given["shapes"] if trains] == [(8, 3, 224, 224)] * 6
    assert given["count"] == NUM_VAL
    assert 0 <= given["correct"] <= NUM_VAL
    assert not given["model"].last.weight.equal(before)
    assert ("DataLoader" in block) or Path("checkpoint/loader").is_dir()


def test_the_loop_that_joins_goes_on_after_the_epochs_that_it_saved(given):
    for num_epochs in (1, 3, 3):
        given["num_epochs"] = num_epochs
        exec(compile(BLOCKS[2], "docs/from_dataloader.md", "exec"), {**given})
    assert len([trains for trains, _ in given["shapes"] if trains]) == 3 * 3
    assert len(list(Path("checkpoint").glob("*/parts.pt"))) == 3
