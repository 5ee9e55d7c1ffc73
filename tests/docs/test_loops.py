"""The loops that people begin with need no trainer, so the oldest torch runs them too."""

import io
import re
import runpy
import signal
import sys

import numpy as np
import pytest
from PIL import Image

from tests.docs.blocks import blocks_of
from tests.multirank import ROOT
from tonari.pack.shards import write_shards


def pictures(count):
    rng = np.random.default_rng(0)
    for number in range(count):
        label = number % 10
        pixels = rng.integers(0, 60, (8, 8), np.uint8)
        pixels[label // 2, 4 * (label % 2) : 4 * (label % 2) + 4] += 190
        png = io.BytesIO()
        Image.fromarray(pixels).save(png, "png")
        yield {"__key__": f"{number:04}", "png": png.getvalue(), "cls": str(label).encode()}


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Shards as the tutorial packs them, in the working directory; there is no trainer."""
    for split, count in (("train", 200), ("val", 50)):
        write_shards(pictures(count), tmp_path / "shards" / split, prefix=split, shard_samples=100)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "tonari.trainer", None)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    return tmp_path


def test_the_tutorials_loops_learn(shards, capsys):
    for page in ("first_epoch", "leave_out"):
        for block in blocks_of(ROOT / f"docs/tutorial/{page}.md"):
            if block.title in ("train.py", "hide.py"):
                (shards / block.title).write_text(block.text)
    runpy.run_path("train.py", run_name="__main__")
    right = [int(found) for found in re.findall(r"(\d+) right", capsys.readouterr().out)]
    assert len(right) == 4
    assert right[-1] > 40
    runpy.run_path("hide.py", run_name="__main__")
    hidden = [int(found) for found in re.findall(r"(\d+)% hidden", capsys.readouterr().out)]
    assert hidden[0] == 0 < max(hidden)


def test_the_example_of_a_loop_of_ones_own_learns(shards, capsys, monkeypatch):
    program = str(ROOT / "examples" / "own_loop.py")
    monkeypatch.setattr(sys, "argv", [program, "shards/train/*.tar", "--batch-size", "10"])
    runpy.run_path(program, run_name="__main__")
    losses = re.findall(r"epoch \d: loss ([\d.]+)", capsys.readouterr().out)
    assert float(losses[2]) < float(losses[0])


def test_the_loop_that_init_fills_in_learns(shards, capsys, monkeypatch):
    program = str(ROOT / "examples" / "slurm" / "loop.py")
    given = [program, "shards/train/*.tar", "--image=png", "--batch-size=20", "--epochs=3"]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it would stay behind the test
    runpy.run_path(program, run_name="__main__")
    losses = [*map(float, re.findall(r"step \d+: loss ([\d.]+)", capsys.readouterr().out))]
    assert len(losses) == 30
    assert sum(losses[-10:]) < sum(losses[:10])
