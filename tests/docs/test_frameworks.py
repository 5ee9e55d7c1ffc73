"""The page of frameworks: what of it needs none of them runs."""

import sys
from types import SimpleNamespace
from typing import Any

import torch

from examples import pictures
from tests.docs.blocks import blocks_of
from tests.multirank import ROOT
from tonari.pack.shards import write_shards


def test_pictures_and_captions_come_as_open_clips_loop_takes_them(tmp_path, monkeypatch):
    captions = {}

    def samples():
        for sample in pictures.samples(20, seed=0):
            number = int(str(sample["__key__"]))
            captions[number] = f"a disc of colour {number}"
            yield {key: sample[key] for key in ("__key__", "jpg")} | {
                "txt": captions[number].encode()
            }

    def tokenizer(text):
        return torch.tensor([[ord(letter) for letter in text.ljust(77)]])

    write_shards(samples(), tmp_path / "laion", prefix="part", shard_samples=10)
    page = ROOT / "docs/frameworks.md"
    (block,) = [block.text for block in blocks_of(page) if "import open_clip" in block.text]
    for written, here in (
        ("laion/{00000..41455}.tar", f"{tmp_path}/laion/part-*.tar"), ("256", "5"),
        ("    ...", "    seen.append((images, texts))"),
    ):  # fmt: skip
        assert written in block
        block = block.replace(written, here)
    made = SimpleNamespace(get_tokenizer=lambda name: tokenizer)
    monkeypatch.setitem(sys.modules, "open_clip", made)
    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "cache"))
    given: dict[str, Any] = {"device": "cpu", "seen": []}
    exec(compile(block, str(page), "exec"), given)
    given["loader"].close()
    images, texts = (torch.cat(parts) for parts in zip(*given["seen"], strict=True))
    assert (images.shape, images.dtype) == ((20, 3, 224, 224), torch.uint8)
    assert texts.dtype == torch.int64
    read = {"".join(map(chr, text)).strip() for text in texts.tolist()}
    assert read == {*captions.values()}
