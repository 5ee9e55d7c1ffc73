"""A study of text: two sources, one of them hard, on sequences of a few bytes."""

from pathlib import Path

STUDY = """
[study]
baseline = "full"
seeds = 2
cost = "cost_rows"
[data]
kind = "text"
train = "train-*.txt"
test = "test-*.txt"
sequence_length = 12
train_samples = 96
junk = 0.5
[settings]
shuffle = "global"
replicas = 2
batch_size = 8
epochs = 4
width = 8
heads = 2
optimizer = "adamw"
lr = 0.01
partition = "random"
[arms.full]
[grid.fewer]
name = "full, {epochs_fraction}"
epochs_fraction = [0.5]
control = "epochs"
[grid.random]
name = "random, {epochs_fraction}"
importance = "random"
fraction = 0.5
epochs_fraction = [1.0]
control = "random"
[arms.highest]
importance = "tonari.ablate.study.highest:HighestLoss"
args = {fraction = 0.4, begins = 1}
control = "highest"
[arms.oracle]
importance = "tonari.ablate.study.oracle:Oracle"
control = "oracle"
[grid.learnable]
name = "learnable, {epochs_fraction}"
importance = "learnable"
epochs_fraction = [0.75, 1.0]
"""

WORDS = b"the quick brown fox jumps over the lazy dog and runs away "


def make_text_study(directory: Path) -> Path:
    """Write the study beside its text: words in order, and numbers that count."""
    numbers = " ".join(str(n) for n in range(1000)).encode()
    for name, size in (("train", 1400), ("test", 400)):
        (directory / f"{name}-easy.txt").write_bytes((WORDS * 40)[:size])
        (directory / f"{name}-hard.txt").write_bytes(numbers[:size])
    (directory / "study.toml").write_text(STUDY)
    return directory / "study.toml"
