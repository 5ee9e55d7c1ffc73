"""A small tokenizer of its own, made without a network."""

from pathlib import Path

import pytest


def make_tokenizer(path: Path, *, end: str = "<|endoftext|>", words: str = "") -> Path:
    """Train a byte-level BPE on a few words, and save it as a ``tokenizer.json``."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[end], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([words or "to be or not to be that is the question"], trainer)
    made.save(str(path))
    return path
