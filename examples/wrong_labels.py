"""Which measure finds wrong labels best? Change some, train, and count them among the first rows.

    python examples/wrong_labels.py data/cifar10-train.parquet --noise 0.1 0.2 --seeds 0 1

A small CNN is trained on a part of a Parquet file of images (jpg) and classes (cls), some labels
changed to another class, each as likely, every row's scores kept by `importance.Full(columns)`. One
line of JSON for each noise and seed: for each measure of `tonari hardest --by`, over all rows and
within each class, the share of changed labels among the first 1, 5, 10 and 20 % of the rows, and
the area under the ROC curve.
"""

import argparse
import io
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import cross_entropy

import dataio
import importance
from dataio.base.seeding import generator, key
from dataio.plan.history import COLUMNS, ScoreColumn, Scores
from dataio.state.snapshot import load_scores
from tonari.hardest.rank import MEASURES, hardness, within_classes
from tonari.trainer import SmallCNN, seeded

FIRST = (0.01, 0.05, 0.1, 0.2)
"""Shares of the rows that are looked at."""


def read_images(
    path: Path, num_rows: int, seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Decode some rows: uint8[num_rows, 3, height, width], and their classes."""
    table = pq.read_table(path, columns=["jpg", "cls"])
    rows = generator(key(seed, "rows")).permutation(table.num_rows)[:num_rows]
    taken = table.take(rows)
    images = [
        np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        for data in taken.column("jpg").to_pylist()
    ]
    pixels = np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))
    return pixels, taken.column("cls").to_numpy()


def change_labels(
    labels: NDArray[np.int64], noise: float, *, classes: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Give some rows the label of another class, each as likely.

    Returns:
        int64[n]: The labels; bool[n]: which were changed.
    """
    rng = generator(key(seed, "changed labels"))
    changed = np.zeros(len(labels), np.bool_)
    changed[rng.choice(len(labels), size=round(noise * len(labels)), replace=False)] = True
    shift = rng.integers(1, classes, len(labels))
    return np.where(changed, (labels + shift) % classes, labels), changed


def train(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    *,
    epochs: int,
    seed: int,
    columns: tuple[ScoreColumn, ...],
) -> Scores:
    """Train a small CNN, and return what was remembered of each row."""
    model = seeded(lambda: SmallCNN(int(labels.max()) + 1), seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    source = dataio.NumpySource({"image": images, "label": labels})
    fields = {"image": dataio.Array("image", images.shape[1:], "uint8")}
    with (
        tempfile.TemporaryDirectory() as root,
        dataio.Loader(
            source, batch_size=64, fields=fields | {"label": dataio.Int("label")}, seed=seed,
            cache=Path(root) / "cache", importance=importance.Full(columns=columns),
        ) as loader,
    ):  # fmt: skip
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.05, total_steps=loader.max_steps(epochs)
        )
        for _ in loader.epochs(epochs):
            for batch in loader:
                logits = model(batch["image"])
                loss = cross_entropy(logits, batch["label"], reduction="none")
                optimizer.zero_grad()
                (loss * batch["weight"]).mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                loader.report(batch, loss, *importance.outcome(logits, batch["label"]))
        loader.save(Path(root) / "saved")
        return load_scores(Path(root) / "saved")


def judge(
    values: NDArray[np.float32], changed: NDArray[np.bool_], labels: NDArray[np.int64]
) -> dict[str, float]:
    """Count changed labels among the hardest rows; the share by chance is that of all rows.

    ``of_one_class`` is the share of the first 5 % that have the commonest label among them.
    """
    order = np.argsort(-values, kind="stable")
    found = {f"first_{share:.0%}": changed[order[: round(share * len(order))]] for share in FIRST}
    ranks = np.empty(len(order))
    ranks[order[::-1]] = np.arange(len(order))
    area = ranks[changed].mean() - ranks[~changed].mean()
    first = np.bincount(labels[order[: round(0.05 * len(order))]])
    return {name: round(float(hits.mean()), 4) for name, hits in found.items()} | {
        "auc": round(float(area / len(order) + 0.5), 4),
        "of_one_class": round(float(first.max() / first.sum()), 4),
    }


def main() -> None:
    """Print a line of JSON for each noise and seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parquet", type=Path, help="columns jpg (image) and cls (0, 1 ...)")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    torch.set_num_threads(1)
    # Whatever is remembered and can be ranked by
    columns = tuple(name for name in COLUMNS if name != "epoch")
    for seed in given.seeds:
        images, right = read_images(given.parquet, given.rows, seed)
        for noise in given.noise:
            started = time.perf_counter()
            classes = int(right.max()) + 1
            labels, changed = change_labels(right, noise, classes=classes, seed=seed)
            scores = train(images, labels, epochs=given.epochs, seed=seed, columns=columns)
            told: dict[str, object] = {
                "noise": noise, "seed": seed, "rows": given.rows, "epochs": given.epochs,
                "seconds": round(time.perf_counter() - started, 1),
            }  # fmt: skip
            for by in MEASURES:
                values = hardness(scores, by=by)
                told[by] = judge(values, changed, labels)
                told[f"{by}, within classes"] = judge(
                    within_classes(values, labels), changed, labels
                )
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
