"""A small GPT to search settings for."""

from pathlib import Path

from tonari.trainer.config.config import Config, load_config

GPT = """
[data]
kind = "text"
train = "absent.txt"
sequence_length = 16
batch_size = 8
[shuffle]
exchange = 0.1
[model]
kind = "gpt"
width = 32
depth = 4
heads = 4
[optimizer]
kind = "adamw"
[run]
device = "cpu"
"""


def load(directory: Path, *overrides: str, text: str = GPT) -> Config:
    path = directory / "run.toml"
    path.write_text(text)
    return load_config(path, overrides)
