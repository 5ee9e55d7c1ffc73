"""How many wrong labels do the hardest rows hold? Change some, train, and look for them.

    python examples/label_noise.py data/cifar10-train.parquet --out runs/label_noise

Takes a Parquet file of images (jpg) and classes (cls); writes a copy with some labels changed,
trains a small CNN on it with every row's scores kept, and says what part of the rows that `tonari
hardest` puts first were changed.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

import dataio
import importance
import tonari.hardest.command
from dataio.base.seeding import generator, key
from dataio.plan.history import ScoreColumn
from tonari.trainer import SmallCNN, seeded

COLUMNS: tuple[ScoreColumn, ...] = ("loss", "loss_mean", "correct", "confidence", "forgotten")


def main() -> None:
    given = parse_arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    shard = given.out / "changed.parquet"
    changed = change_labels(given.parquet, shard, fraction=given.changed, classes=given.classes)
    train(shard, given)
    look(shard, given.out, changed)


def look(shard: Path, directory: Path, changed: NDArray[np.int64]) -> None:
    num_rows = pq.read_metadata(shard).num_rows
    print(f"{len(changed):,} of {num_rows:,} labels changed: chance {len(changed) / num_rows:.3f}")
    for by in ("loss_mean", "loss", "forgotten", "confidence"):
        out = directory / by
        argv = [str(directory / "saved"), "--source", str(shard), "--by", by, "--out", str(out)]
        tonari.hardest.command.main([*argv, "--top", str(len(changed))])
        with open(out / "hardest.csv", newline="") as file:
            found = np.array([int(row["sample_id"]) for row in csv.DictReader(file)])
        shares = {k: np.isin(found[:k], changed).mean() for k in (100, 500, len(changed))}
        print(f"{by}: " + ", ".join(f"{share:.3f} of {k:,}" for k, share in shares.items()))


def change_labels(source: Path, out: Path, *, fraction: float, classes: int) -> NDArray[np.int64]:
    """Write a copy in which some labels are another class; return the samples changed."""
    table = pq.read_table(source)
    labels = table.column("cls").to_numpy().copy()
    rng = generator(key(0, "changed labels"))
    changed = rng.choice(len(labels), size=round(fraction * len(labels)), replace=False)
    labels[changed] = (labels[changed] + rng.integers(1, classes, len(changed))) % classes
    place = table.schema.get_field_index("cls")
    pq.write_table(table.set_column(place, "cls", pa.array(labels)), out, row_group_size=5000)
    return np.sort(changed)


def train(shard: Path, given: argparse.Namespace) -> None:
    model = seeded(lambda: SmallCNN(given.classes), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=given.lr, momentum=0.9, weight_decay=5e-4)
    fields: dict[str, dataio.Field] = {
        "image": dataio.Image("jpg", resize=dataio.Resize(32), decoded=True),
        "label": dataio.Int("cls"),
    }
    with dataio.Loader(
        str(shard), batch_size=128, fields=fields, seed=0, cache=given.out / "cache",
        importance=importance.Full(columns=COLUMNS),
    ) as loader:  # fmt: skip
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, given.lr, total_steps=loader.max_steps(given.epochs)
        )
        for epoch in loader.epochs(given.epochs):
            right = 0.0
            for batch in loader:
                logits = model(batch["image"])
                loss = cross_entropy(logits, batch["label"], reduction="none")
                optimizer.zero_grad()
                (loss * batch["weight"]).mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                correct, confidence = importance.outcome(logits, batch["label"])
                loader.report(batch, loss, correct, confidence)
                right += float(correct.float().mean()) / len(loader)
            print(f"epoch {epoch}: {right:.3f} of the labels predicted", flush=True)
        loader.save(given.out / "saved")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("parquet", type=Path, help="columns jpg (image) and cls (0, 1 ...)")
    parser.add_argument("--out", type=Path, required=True, help="directory for all that is made")
    parser.add_argument("--changed", type=float, default=0.05, help="part of the labels")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    return parser.parse_args()


if __name__ == "__main__":
    main()
