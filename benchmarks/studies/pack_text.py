"""How fast is text packed beside the tokenizer alone, and how well do documents fill sequences?

Documents are parts of a text, of lengths drawn from a seed, as JSON lines; the tokenizer is a
byte-level BPE that is trained on the text. In turns: ``tokenizer``: the library encodes the same
documents, in batches of as many, and drops the tokens; ``pack``: the command `tonari pack`, start
and files included. Then, for some lengths of sequence: the share of real tokens, and how much more
the slowest of 8 replicas, each on a node, computes in a step than the mean of them, where attention
costs what its mask keeps: in the order of the loader, and in one that is shuffled alone.

    python -m benchmarks.studies.pack_text TEXT [--megabytes 100]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dataio.plan.balance import balance
from dataio.source.formats.megatron import HEAD, read_head, read_part
from dataio.source.storage.files import Storage
from dataio.source.text.dataset import read_infos
from dataio.source.wrap.packing import Packing, attention_costs, pack
from tonari.report.machine import describe_machine

BATCH_CHARACTERS = 2 << 20
VOCABULARY, WIDTH, NUM_REPLICAS, BATCHES = 8000, 768, 8, (8, 32)


def cpu_s() -> float:
    """Measure the processor time of this process and those it started so far."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def make_documents(text: str, path: Path, *, num_bytes: int, seed: int = 0) -> list[str]:
    """Write parts of a text as JSON lines: lengths are lognormal, about 1500 characters."""
    rng = np.random.default_rng(seed)
    texts: list[str] = []
    left = num_bytes
    while left > 0:
        length = min(int(rng.lognormal(7.3, 1.2)) + 1, len(text) - 1)
        first = int(rng.integers(0, len(text) - length))
        texts.append(text[first : first + length])
        left -= length
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    return texts


def make_tokenizer(text: str, path: Path) -> None:
    """Train a byte-level BPE, and save it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(text.splitlines(keepends=True), trainer)
    made.save(str(path))


def encode(texts: list[str], tokenizer: Path) -> None:
    """Encode documents with the library alone."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer))
    batch, num_characters = [], 0
    for text in texts:
        batch.append(text)
        num_characters += len(text)
        if num_characters >= BATCH_CHARACTERS:
            library.encode_batch_fast(batch)
            batch, num_characters = [], 0
    library.encode_batch_fast(batch)


def speeds(directory: Path, texts: list[str], lines: Path, *, repeats: int) -> dict[str, object]:
    """Measure both ways in turns."""
    tokenizer = directory / "tokenizer.json"
    num_bytes = sum(len(text.encode()) for text in texts)
    command = [sys.executable, "-m", "tonari", "pack", str(lines), str(directory / "out")]
    command += ["--tokenizer", str(tokenizer), "--overwrite"]
    ways: dict[str, Callable[[], object]] = {
        "tokenizer": lambda: encode(texts, tokenizer),
        "pack": lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL),
    }
    wall: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            started, cpu = time.perf_counter(), cpu_s()
            way()
            wall[name].append(time.perf_counter() - started)
            used[name].append(cpu_s() - cpu)
    figures: dict[str, object] = {}
    for name, values in wall.items():
        figures[f"{name}_bytes_per_s"] = num_bytes / statistics.median(values)
        figures[f"{name}_cpu_s_per_gb"] = statistics.median(used[name]) / num_bytes * 1e9
    for what, both in (("speed", wall), ("cpu", used)):
        ratios = [a / b for a, b in zip(both["tokenizer"], both["pack"], strict=True)]
        figures[f"{what}_ratio"] = statistics.median(ratios)
        figures[f"p10_{what}_ratio"] = float(np.percentile(ratios, 10))
    return figures


def packed_lengths(directory: Path) -> np.ndarray:
    """Read how many tokens each packed document has: int64[num_documents]."""
    storage, found = Storage(), []
    for shard in read_infos([str(directory)]).shards:
        with storage.open(str(Path(shard).with_suffix(".idx"))) as file:
            count = read_head(file).num_sequences
            found.append(read_part(file, HEAD.size, "<i4", 0, count).astype(np.int64))
    return np.concatenate(found)


def filled(lengths: np.ndarray, *, length: int, packing: Packing) -> dict[str, object]:
    """Compute how full sequences are, and how unequal the cost of a layer is."""
    pieces = pack(lengths, length=length, packing=packing)
    looked_at = np.add.reduceat(pieces.lengths.astype(float) ** 2 / 2, pieces.starts[:-1])
    # Operations of a layer's forward pass: products of its weights, and attention.
    cost = 24 * length * WIDTH**2 + 4 * WIDTH * looked_at
    figures: dict[str, object] = {
        "length": length, "packing": packing, "real_fraction": pieces.real_fraction(length),
    }  # fmt: skip
    rows = np.random.default_rng(0).permutation(len(cost))
    levels = attention_costs(pieces, length=length)
    for batch in BATCHES:
        num_steps = len(cost) // (NUM_REPLICAS * batch)
        if not num_steps:
            continue
        # int64[NUM_REPLICAS, num_steps * batch]
        shuffled = rows[: num_steps * NUM_REPLICAS * batch].reshape(NUM_REPLICAS, -1)
        balanced = [balance(levels, own, num_replicas=1, batch_size=batch) for own in shuffled]
        for name, order in (("shuffled", shuffled), ("balanced", np.array(balanced))):
            # float64[NUM_REPLICAS, num_steps]
            each = cost[order].reshape(NUM_REPLICAS, num_steps, batch).sum(axis=2)
            figures[f"{name}_slowest_over_mean_{batch}"] = float(
                np.mean(each.max(axis=0) / each.mean(axis=0))
            )
    return figures


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    text = args.text.read_text()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_tokenizer(text, directory / "tokenizer.json")
        lines = directory / "documents.jsonl"
        texts = make_documents(text, lines, num_bytes=int(args.megabytes * 1e6))
        figures = speeds(directory, texts, lines, repeats=args.repeats)
        lengths = packed_lengths(directory / "out")
    ways: tuple[Packing, ...] = ("concatenated", "best_fit")
    line = {
        "question": "packing of text beside the tokenizer alone",
        "megabytes": args.megabytes,
        "documents": len(texts),
        "repeats": args.repeats,
        **figures,
        "sequences": [
            filled(lengths, length=length, packing=packing)
            for length in (512, 1024, 4096)
            for packing in ways
        ],
        **describe_machine(Path.cwd()),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
