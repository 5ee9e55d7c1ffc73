"""Every block of code of docs/transforms.md runs, and what it says of the libraries holds."""

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PillowImage

from tests import torchvision_v2
from tests.dataio.source.shards import write_tar
from tests.multirank import ROOT

BLOCKS = [
    block.split("```")[0]
    for block in (ROOT / "docs" / "transforms.md").read_text().split("```python\n")[1:]
]
NEEDS = {
    "torchvision": "pip install tonari[transforms]",
    "kornia": "pip install tonari[transforms]",
    "albumentations": "pip install tonari[transforms]",
    "soundfile": "pip install soundfile",
}


def jpg(i: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(i).integers(0, 256, (40 + i, 48, 3), np.uint8)
    PillowImage.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def wav(i: int) -> bytes:
    if importlib.util.find_spec("soundfile") is None:
        return b"no audio"
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(8000 + i, np.float32), 8000, format="WAV")
    return buffer.getvalue()


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """What the page's blocks read: two shards to train on, one to evaluate on."""
    for name, ids in {
        "train-000000": range(6),
        "train-000001": range(6, 12),
        "val-000000": range(12, 17),
    }.items():
        members = []
        for i in ids:
            members += [
                (f"s{i:02d}.jpg", jpg(i)),
                (f"s{i:02d}.cls", b"%d" % (i % 10)),
                (f"s{i:02d}.tokens.npy", npy(np.arange(i + 1, dtype=np.int32))),
                (f"s{i:02d}.wav", wav(i)),
                (f"s{i:02d}.xyz", np.zeros((i + 1, 3), "<f4").tobytes()),
            ]
        write_tar(tmp_path / f"{name}.tar", members)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "cache"))
    return tmp_path


def title(block: str) -> str:
    words = [
        line.split()[1] for line in block.splitlines() if line.startswith(("import ", "from "))
    ]
    return ",".join(words)


@pytest.mark.parametrize("block", BLOCKS, ids=title)
def test_each_block_of_the_page_runs(directory, block):
    for module, cure in NEEDS.items():
        if f"import {module}" not in block and f"from {module}" not in block:
            continue
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: {cure}")
    if "torchvision" in block:
        torchvision_v2.import_or_skip()
    if "processes=" in block:
        run_as_script(directory, block)
    else:
        exec(compile(block, "docs/transforms.md", "exec"), {"__name__": "__main__"})


def run_as_script(directory: Path, block: str) -> None:
    """Run a block that starts processes, which import it."""
    helped = block
    if "torchvision" in block:
        helped = f"from tests import torchvision_v2\n\ntorchvision_v2.import_or_skip()\n{block}"
    (directory / "mine.py").write_text(helped)
    done = subprocess.run(
        [sys.executable, "mine.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_library_that_the_page_names_has_a_block():
    assert len(BLOCKS) == 9
    for module in NEEDS:
        assert any(f"import {module}" in block or f"from {module}" in block for block in BLOCKS)
