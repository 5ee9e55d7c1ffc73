"""Packed text to train on."""

import json
from pathlib import Path

import numpy as np

from dataio.source.text.tokenizer import ByteTokenizer, Tokenizer
from tonari.pack.documents import Documents
from tonari.pack.text import pack_text

TOML = """
[data]
kind = "text"
train = "{train}"
test = "{test}"
sequence_length = 16
batch_size = 16
workers.threads = 0
[text]
packing = "best_fit"
[model]
kind = "gpt"
width = 8
depth = 2
heads = 2
[shuffle]
exchange = 0.3
[optimizer]
kind = "adamw"
lr = 0.03
clip = 1.0
[mesh]
dtype = "float64"
[run]
epochs = 2
log_steps = 1
device = "cpu"
"""
WORDS = "the cat sat on a mat and saw two rats in its hat".split()


def write_packed(directory: Path, *, num_documents: int, tokenizer: Tokenizer | None = None) -> str:
    """Pack documents of some words each, by a seed, in several shards."""
    rng = np.random.default_rng(num_documents)
    lines = directory.with_suffix(".jsonl")
    with lines.open("w") as file:
        for count in rng.integers(1, 8, num_documents).tolist():
            file.write(json.dumps({"text": " ".join(rng.choice(WORDS, count))}) + "\n")
    pack_text(
        Documents((lines,), "text", "file"), directory, tokenizer or ByteTokenizer(),
        shard_bytes=num_documents * 6, overwrite=True,
    )  # fmt: skip
    return str(directory)


def write_config(directory: Path, *, num_documents: int = 150) -> Path:
    """Write a configuration, and what it trains and evaluates on."""
    train = write_packed(directory / "train", num_documents=num_documents)
    test = write_packed(directory / "test", num_documents=40)
    path = directory / "run.toml"
    path.write_text(TOML.format(train=train, test=test))
    return path
